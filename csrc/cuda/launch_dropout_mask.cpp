// The dropout mask on a device; no header of CUDA or of c10/cuda is needed.
#include <vector>

#include "cpu/plan.h"
#include "cuda/dropout_mask.h"
#include "cuda/tickets.h"

namespace mlora::cuda {
namespace {

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
  const Queue queue = queue_of(mask);
  for (const RowBlock& block : plan.blocks) {
    const MaskSegment segment{block.begin, block.begin + block.rows, block.philox_row,
                              plan.adapters[static_cast<size_t>(block.adapter)].dropout};
    bool* first = static_cast<bool*>(mask.mutable_data_ptr());
    check_launch(queue, launch_dropout_mask(segment, columns, first, queue), "dropout_mask");
  }
  return mask;
}

}  // namespace mlora::cuda

STABLE_TORCH_LIBRARY_IMPL(mlora_ext, CUDA, library) {
  library.impl("dropout_mask", TORCH_BOX(&mlora::cuda::dropout_mask));
}
