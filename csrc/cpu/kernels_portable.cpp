#define MLORA_ISA portable

// clang-format off: Simd comes first, the kernels are written against it
#include "cpu/simd_portable.h"
#include "cpu/tiles.h"
#include "cpu/stage.h"
#include "cpu/make_kernels.h"
#include "cpu/tables.h"
// clang-format on

namespace mlora::cpu {

extern const Kernels kKernels_portable[3] = {
    portable::make_kernels<portable::F32Fma, float>(),
    portable::make_kernels<portable::F32Fma, portable::BF16>(),
    portable::make_kernels<portable::F32Fma, portable::Half>(),
};

}  // namespace mlora::cpu
