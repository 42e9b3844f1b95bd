// Python's view of csrc/io.
#pragma once

#include <pybind11/pybind11.h>

namespace mlora::io {

void bind(pybind11::module_& module);

}  // namespace mlora::io
