#define MLORA_ISA avx2

// clang-format off: Simd comes first, the kernels are written against it
#include "cpu/simd_avx2.h"
#include "cpu/tiles.h"
#include "cpu/stage.h"
#include "cpu/make_kernels.h"
#include "cpu/tables.h"
// clang-format on

namespace mlora::cpu {

extern const Kernels kKernels_avx2[3] = {
    avx2::make_kernels<avx2::F32Fma, float>(),
    avx2::make_kernels<avx2::F32Fma, avx2::BF16>(),
    avx2::make_kernels<avx2::F32Fma, avx2::Half>(),
};

}  // namespace mlora::cpu
