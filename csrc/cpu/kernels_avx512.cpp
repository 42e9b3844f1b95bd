#define MLORA_ISA avx512

// clang-format off: Simd comes first, the kernels are written against it
#include "cpu/simd_avx512.h"
#include "cpu/tiles.h"
#include "cpu/stage.h"
#include "cpu/make_kernels.h"
#include "cpu/tables.h"
// clang-format on

namespace mlora::cpu {

extern const Kernels kKernels_avx512[3] = {
    avx512::make_kernels<avx512::F32Fma, float>(),
    avx512::make_kernels<avx512::F32Fma, avx512::BF16>(),
    avx512::make_kernels<avx512::F32Fma, avx512::Half>(),
};

}  // namespace mlora::cpu
