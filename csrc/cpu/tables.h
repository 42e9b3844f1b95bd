// The tables of kernels, indexed by Scalar; each is compiled with its own instruction set.
#pragma once

#include "cpu/kernels.h"

namespace mlora::cpu {

extern const Kernels kKernels_portable[3];
extern const Kernels kKernels_avx2[3];
extern const Kernels kKernels_avx512[3];
extern const Kernels kKernels_avx512bf16[3];
extern const Kernels kKernels_amx;  // of bf16; other dtypes have no matrix tiles

}  // namespace mlora::cpu
