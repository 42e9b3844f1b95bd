// Torch-free entries of the kernels. Each returns the CUDA error code, 0 for success.
//
// Letters: T rows, d columns, N adapters, R largest rank, K tiles, M splits, L layers that share x.
#pragma once

#include <string>

#include "cuda/factor.h"
#include "cuda/philox.h"
#include "cuda/plan.h"

namespace mlora::cuda {

// The layers that one launch serves.
constexpr int kMostLayers = 4;

struct Queue {
  void* stream;
  int device;
};

// A matrix of rows whose last dimension is dense; `aligned` where each row begins at a multiple of 16 bytes,
// and 64 rows lie within 2 GiB.
struct Rows {
  const void* data;
  int64_t stride;
  bool aligned;
};

struct OutRows {
  void* data;
  int64_t stride;
  bool aligned;
};

// Tables that the plan kernel writes.
struct PlanTables {
  Tile* tiles;
  int32_t tile_count;
  Split* splits;
  int32_t split_count;
  Group* groups;
};

// Of `PartView`, with room for `most_parts`.
struct PartTables {
  int32_t* starts;
  Tile* parts;
  int32_t room;
};

struct PlanView {
  const Tile* tiles;
  int32_t tile_count;
  const Split* splits;
  int32_t split_count;
  const Group* groups;
};

// fp32 sums of several programs. The last of them, as their ticket says, adds them up in order. Tickets are 0
// before a launch and after it.
struct Partial {
  float* sums;
  int* tickets;
};

struct ShrinkArguments {
  Scalar type;
  Rows rows;  // [T, d]
  FactorTable factor;
  PlanView plan;
  const float* scaling;
  DropoutTables dropout;
  bool drops;       // the rows; else only the scale of kept elements counts
  uint32_t* keep;   // [L, T, d / 32, rounded up]: which elements are kept; null: not wanted
  void* out;        // [L, T, R]
  int parts;        // programs that share a sum over columns: 1, or one for each quarter
  Partial partial;  // [parts, 2, L, T, R], where there are several parts
  int64_t rows_total;
  int layers;
  int columns;
  int ranks;
};

// The result of one layer.
struct ExpandOutput {
  FactorTable factor;
  const void* bias;
  OutRows out;  // [T, d]
  int columns;
  int first_block;  // of the launch
};

struct ExpandArguments {
  Scalar type;
  Rows s;  // [L, T, R]
  int64_t layer_stride;
  int layers;
  bool add;  // to what is there
  PlanView plan;
  ExpandOutput output[kMostLayers];
  int ranks;
};

struct GradientArguments {
  Scalar type;
  Rows rows;  // [T, d]: dy or x
  Rows s;     // [L, T, R]: s or ds
  int64_t layer_stride;
  int layers;
  FactorTable factor;
  PlanView plan;
  DropoutTables dropout;  // of the rows
  const uint32_t* keep;   // as shrink has stored it; null: masks are drawn anew
  void* gradient;         // dtype of the factor; null where it is not wanted
  Partial partial;        // [L slots, R, d]
  int slots;              // of one layer
  OutRows dx;             // [T, d]; null where it is not wanted
  bool add_dx;            // to what is there
  int64_t rows_total;
  int columns;
  int ranks;
  bool add;  // to what `gradient` holds

  MLORA_HD bool aligned() const {
    return rows.aligned && s.aligned && factor.aligned && columns % 8 == 0 &&
           (dx.data == nullptr || dx.aligned);
  }
};

struct ReadDyArguments {
  ShrinkArguments ds[kMostLayers];
  GradientArguments gradient[kMostLayers];
  int first_program[kMostLayers + 1];
  int layers;
  bool need_ds;
  bool need_gradient;
  bool once;  // in one pass over dy, where that is served
};

// Why the driver or the current device cannot run these kernels; empty where it can, or where none is.
std::string driver_refusal();

// The id of the capture that the queue's stream takes part in; 0: none.
uint64_t capture_of(const Queue& queue);

// How many programs share a sum over columns, of so many tiles: several where few tiles would leave much of
// the device idle.
int shrink_parts(const Queue& queue, int64_t tiles, int columns);

int launch_plan(const Batch& batch, const PlanTables& tables, const Queue& queue);
int launch_parts(const Batch& batch, const PartTables& tables, const Queue& queue);
int launch_shrink(const ShrinkArguments& arguments, const Queue& queue);
int launch_expand(ExpandArguments arguments, const Queue& queue);
int launch_read_dy(ReadDyArguments arguments, const Queue& queue);
int launch_read_x(const GradientArguments& arguments, const Queue& queue);

// The widest panel of ranks that a kernel holds.
constexpr int kFloatRanks = 64;
constexpr int kTensorRanks = 128;
MLORA_HD constexpr int widest_panel(Scalar type) {
  return type == Scalar::kFloat ? kFloatRanks : kTensorRanks;
}

// Columns of a block of a gradient, of s F, and of a word of keep bits.
constexpr int kBlockColumns = 64;
constexpr int kWordColumns = 32;

MLORA_HD int panels_of(Scalar type, int64_t ranks) { return ceil_div(ranks, widest_panel(type)); }

// How many tickets a launch takes, at most.
inline int64_t shrink_tickets(Scalar type, int64_t tiles, int64_t layers, int64_t ranks) {
  return tiles * layers * panels_of(type, ranks);
}
inline int64_t gradient_tickets(int64_t adapters, int64_t layers, int64_t columns, int64_t ranks) {
  return adapters * layers * ceil_div(columns, kBlockColumns) * ceil_div(ranks, kFloatRanks);
}

}  // namespace mlora::cuda
