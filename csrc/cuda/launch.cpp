// The CUDA operators: torch's tensors in, torch-free launches out. No header of CUDA or of c10/cuda is
// needed.
#include <vector>

#include "cpu/plan.h"
#include "cuda/dropout_mask.h"

// Weak: a CPU-only torch does not have it, and this library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);

namespace mlora::cuda {
namespace {

void* current_stream(int32_t device) {
  MLORA_CHECK(aoti_torch_get_current_cuda_stream, "this torch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

Tensor on_cpu(const Tensor& tensor) {
  return torch::stable::to(tensor, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

}  // namespace

// Debugging and tests: the layout is read on the host, one launch per segment.
Tensor dropout_mask(const Tensor& segments, const Tensor& dropout_p, const Tensor& dropout_rng,
                    const Tensor& layer, int64_t rows, int64_t columns) {
  MLORA_CHECK(rows >= 0 && columns >= 1, "rows, columns: expected at least 0 and 1, got ", rows, " and ",
              columns);
  const Tensor table = on_cpu(segments), p = on_cpu(dropout_p), rng = on_cpu(dropout_rng),
               index = on_cpu(layer);
  const cpu::Layout layout{table, p, &p, &rng, &index};
  cpu::check_layout(layout, p.numel());
  const cpu::Plan plan =
      cpu::make_plan(layout, std::vector<int64_t>(static_cast<size_t>(p.numel()), 1), rows);
  Tensor mask = torch::stable::full({rows, columns}, 1.0, ScalarType::Bool, std::nullopt, segments.device());
  void* stream = current_stream(segments.get_device_index());
  for (const RowBlock& block : plan.blocks) {
    const MaskSegment segment{block.begin, block.begin + block.rows, block.philox_row,
                              plan.adapters[static_cast<size_t>(block.adapter)].dropout};
    const int error =
        launch_dropout_mask(segment, columns, static_cast<bool*>(mask.mutable_data_ptr()), stream);
    MLORA_CHECK(error == 0, "dropout_mask: CUDA error ", error);
  }
  return mask;
}

}  // namespace mlora::cuda

STABLE_TORCH_LIBRARY_IMPL(mlora_ext, CUDA, library) {
  library.impl("dropout_mask", TORCH_BOX(&mlora::cuda::dropout_mask));
}
