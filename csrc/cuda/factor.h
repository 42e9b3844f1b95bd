// Where the factors F [r, d] of the adapters and their gradients lie, as docs/dev/gpu.md lays it down.
#pragma once

#include "cuda/host_device.h"
#include "params.h"

namespace mlora::cuda {

struct FactorRow {
  int64_t offset;
  int64_t rank_stride;
  int64_t column_stride;
  int64_t rank;
  int64_t grad_offset;
  int64_t grad_rank_stride;
  int64_t grad_column_stride;
  int64_t unused;
};

// L layers that share x, one after the other: N rows each.
struct FactorTable {
  const void* base;
  const FactorRow* rows;
  int adapters;
  Scalar type;
  bool aligned;  // columns are dense, and each row begins at a multiple of 16 bytes
};

MLORA_HD const FactorRow& row_of(const FactorTable& table, int layer, int adapter) {
  return table.rows[layer * table.adapters + adapter];
}

// The ranks that a panel of `width` ranks from `first` on holds of an adapter.
MLORA_HD int panel_ranks(int64_t rank, int first, int width) {
  const int64_t left = rank - first;
  return static_cast<int>(left < 0 ? 0 : left < width ? left : width);
}

}  // namespace mlora::cuda
