// The pybind11 module `mlora_ext._C`: what carries no tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "cpu/isa.h"
#include "io/bind.h"

namespace {

std::vector<std::string> compiled_isas() {
  return {mlora::cpu::kCompiledIsas.begin(), mlora::cpu::kCompiledIsas.end()};
}

pybind11::dict build_info() {
  pybind11::dict info;
  info["version"] = MLORA_VERSION;
  info["compiler"] = __VERSION__;
  info["cuda"] =
#ifdef MLORA_WITH_CUDA
      true;
#else
      false;
#endif
  info["cpu_isas"] = compiled_isas();
  info["cpu_isa"] = std::string(mlora::cpu::best_isa());
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Build information of mlora_ext, and file input and output past Python's lock.";
  module.def("build_info", &build_info,
             "Version, compiler, whether CUDA kernels were compiled in, the compiled CPU instruction sets "
             "and the best "
             "of them that this processor has.");
  mlora::io::bind(module);
}
