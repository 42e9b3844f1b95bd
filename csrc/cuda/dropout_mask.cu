#include "cuda/dropout_mask.h"
#include "cuda/philox.h"
#include "cuda/plan.h"
#include "cuda/primitives.cuh"

namespace mlora::cuda {
namespace {

constexpr int kMaskThreads = 256;
constexpr int64_t kMostBlocks = 65535;

// A thread serves one counter: eight columns of one row. The grid's y strides over the rows.
__global__ void __launch_bounds__(kMaskThreads)
    dropout_mask_kernel(MaskSegment segment, int64_t columns, bool* mask) {
  const int64_t counter = int64_t{block_x()} * kMaskThreads + thread_index();
  const int64_t column = counter * kCounterColumns;
  if (column >= columns) {
    return;
  }
  for (int64_t row = segment.begin + block_y(); row < segment.end; row += grid_y()) {
    const uint32_t philox_row = segment.philox_row + static_cast<uint32_t>(row - segment.begin);
    const uint32_t keep = keep_bits(philox(segment.dropout, philox_row, static_cast<uint32_t>(counter)),
                                    segment.dropout.threshold);
    for (int i = 0; i < kCounterColumns && column + i < columns; ++i) {
      mask[row * columns + column + i] = (keep >> (i / 2 + i % 2 * 16) & 1u) != 0;
    }
  }
}

}  // namespace

int launch_dropout_mask(const MaskSegment& segment, int64_t columns, bool* mask, const Queue& queue) {
  const int64_t rows = segment.end - segment.begin;
  const int64_t counters = ceil_div(columns, kCounterColumns);
  const Grid grid = {ceil_div(counters, kMaskThreads), rows < kMostBlocks ? rows : kMostBlocks};
  return launch(dropout_mask_kernel, grid, kMaskThreads, 0, queue, segment, columns, mask);
}

}  // namespace mlora::cuda
