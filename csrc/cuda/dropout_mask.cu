#include "cuda/dropout_mask.h"
#include "cuda/philox.cuh"

namespace mlora::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumnsPerCounter = 8;

// A thread serves one counter: eight columns of one row. blockIdx.y strides over the rows.
__global__ void __launch_bounds__(kThreads)
    dropout_mask_kernel(MaskSegment segment, int64_t columns, bool* __restrict__ mask) {
  const int64_t counter = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t column = counter * kColumnsPerCounter;
  if (column >= columns) {
    return;
  }
  for (int64_t row = segment.begin + blockIdx.y; row < segment.end; row += gridDim.y) {
    const uint32_t philox_row = segment.philox_row + static_cast<uint32_t>(row - segment.begin);
    const uint4 words = philox(segment.dropout, philox_row, static_cast<uint32_t>(counter));
#pragma unroll
    for (int i = 0; i < kColumnsPerCounter; ++i) {
      if (column + i < columns) {
        mask[row * columns + column + i] = keeps(words, i, segment.dropout.threshold);
      }
    }
  }
}

}  // namespace

int launch_dropout_mask(const MaskSegment& segment, int64_t columns, bool* mask, void* stream) {
  const int64_t rows = segment.end - segment.begin;
  if (rows <= 0 || columns <= 0) {
    return cudaSuccess;
  }
  const int64_t counters = (columns + kColumnsPerCounter - 1) / kColumnsPerCounter;
  const dim3 grid(static_cast<unsigned>((counters + kThreads - 1) / kThreads),
                  static_cast<unsigned>(rows < 65535 ? rows : 65535));
  dropout_mask_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(segment, columns, mask);
  return cudaGetLastError();
}

}  // namespace mlora::cuda
