// Torch-free entries of the kernels. Each returns the CUDA error code, 0 for success.
//
// Letters: T rows, d columns, N adapters, R largest rank, K tiles, M splits, L layers that share x.
#pragma once

#include "cuda/factor.h"
#include "cuda/philox.h"
#include "cuda/plan.h"

namespace mlora::cuda {

struct Queue {
  void* stream;
  int device;
};

// A matrix of rows whose last dimension is dense; `aligned` where each row begins at a multiple of 16 bytes.
struct Rows {
  void* data;
  int64_t stride;
  bool aligned;
};

struct PlanTables {
  Tile* tiles;
  int32_t tile_count;
  Split* splits;
  int32_t split_count;
  Group* groups;
};

struct ShrinkArguments {
  Scalar type;
  Rows rows;  // [T, d]
  FactorTable factor;
  const Tile* tiles;
  int tile_count;
  const float* scaling;
  DropoutTables dropout;
  void* out;  // [L, T, R], or fp32 [column splits, L, T, R] where `partial`
  bool partial;
  int64_t layer_stride;
  int layers;
  int columns;
  int ranks;
};

struct ExpandArguments {
  Scalar type;
  Rows s;  // [L, T, R]
  int64_t layer_stride;
  int layers;  // whose results are added up
  FactorTable factor;
  const Tile* tiles;
  int tile_count;
  const void* bias;
  DropoutTables dropout;  // of each layer's result
  Rows out;               // [T, d]
  int columns;
  int ranks;
};

struct GradientArguments {
  Scalar type;
  Rows rows;  // [T, d]: dy or x
  Rows s;     // [L, T, R]: s or ds
  int64_t layer_stride;
  int layers;
  FactorTable factor;
  const Tile* tiles;
  int tile_count;
  const Split* splits;
  int split_count;
  DropoutTables dropout;  // of the rows
  void* gradient;         // dtype of the factor; null where it is not wanted
  float* partial;         // [L slots, R, d]
  int slots;              // of one layer
  Rows dx;                // [T, d]; null where it is not wanted
  int columns;
  int ranks;
  bool add;  // to what `gradient` holds
};

struct ReduceArguments {
  const float* partial;  // [L slots, R, d]
  int slots;             // of one layer
  FactorTable factor;
  int layers;
  const Group* groups;
  void* gradient;  // dtype of the factor
  int columns;
  int ranks;
  bool add;  // to what `gradient` holds
};

int launch_plan(const Batch& batch, const PlanTables& tables, const Queue& queue);
int launch_shrink(const ShrinkArguments& arguments, const Queue& queue);
int launch_expand(const ExpandArguments& arguments, const Queue& queue);
// Either part may be absent: its flag is false.
int launch_read_dy(const ShrinkArguments& ds, bool need_ds, const GradientArguments& gradient,
                   bool need_gradient, const Queue& queue);
int launch_read_x(const GradientArguments& arguments, const Queue& queue);
int launch_reduce_rows(const float* partial, int splits, int64_t numbers, Scalar type, void* out,
                       const Queue& queue);
int launch_reduce_gradients(const ReduceArguments& arguments, const Queue& queue);

// The widest panel of ranks that a kernel holds.
constexpr int kFloatRanks = 64;
constexpr int kTensorRanks = 128;
constexpr int widest_panel(Scalar type) { return type == Scalar::kFloat ? kFloatRanks : kTensorRanks; }

}  // namespace mlora::cuda
