#define MLORA_ISA amx

// clang-format off: Simd comes first, the kernels are written against it
#include "cpu/pairs_avx512bf16.h"
#include "cpu/tiles.h"
#include "cpu/stage.h"
#include "cpu/adamw.h"
#include "cpu/amx_kernels.h"
#include "cpu/tables.h"
// clang-format on

namespace mlora::cpu {

extern const Kernels kKernels_amx = {.compute = Scalar::kBFloat16,
                                     .scratch_bytes = amx::amx_scratch_bytes,
                                     .packed_bytes = amx::amx_packed_bytes,
                                     .pack = amx::amx_pack,
                                     .forward = amx::amx_forward,
                                     .sums_size = amx::amx_sums_size,
                                     .backward = amx::amx_backward,
                                     .write_gradient = amx::amx_write_gradient,
                                     .keep_bits = amx::keep_bits,
                                     .adamw = amx::adamw<amx::BF16>,
                                     .squares = amx::squares<amx::BF16>};

}  // namespace mlora::cpu
