// Torch-free entry of the dropout mask kernel; the launcher calls it.
#pragma once

#include "cuda/kernels.h"

namespace mlora::cuda {

// Rows [begin, end) of a mask [rows, columns] belong to one segment, whose first row is `philox_row`.
struct MaskSegment {
  int64_t begin;
  int64_t end;
  uint32_t philox_row;
  Dropout dropout;
};

// Write True where an element of the segment is kept. Returns the CUDA error code, 0 for success.
int launch_dropout_mask(const MaskSegment& segment, int64_t columns, bool* mask, const Queue& queue);

}  // namespace mlora::cuda
