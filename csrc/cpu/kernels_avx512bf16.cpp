#define MLORA_ISA avx512bf16

// clang-format off: Simd comes first, the kernels are written against it
#include "cpu/pairs_avx512bf16.h"
#include "cpu/tiles.h"
#include "cpu/stage.h"
#include "cpu/make_kernels.h"
#include "cpu/tables.h"
// clang-format on

namespace mlora::cpu {

extern const Kernels kKernels_avx512bf16[3] = {
    avx512bf16::make_kernels<avx512bf16::F32Fma, float>(),
    avx512bf16::make_kernels<avx512bf16::BF16Dot, avx512bf16::BF16>(),
    avx512bf16::make_kernels<avx512bf16::F32Fma, avx512bf16::Half>(),
};

}  // namespace mlora::cpu
