// The table of CPU kernels, one per instruction set and dtype of x.
#pragma once

#include <string_view>

#include "params.h"

namespace mlora::cpu {

// One block of rows: s = scaling * drop(x) A^T, then y += s B^T.
struct ForwardArgs {
  const AdapterView* adapter;
  const RowBlock* block;
  const void* x;
  int64_t x_stride;
  void* y;
  int64_t y_stride;
  void* s;
  int64_t s_stride;  // max rank
  int64_t d_in;
  int64_t d_out;
  void* scratch;
};

// A group of one adapter's blocks: ds = keep_scale scaling dy B, dB = dy^T s, dA = ds^T drop(x), and
// dx += drop'(ds A).
struct BackwardArgs {
  const AdapterView* adapter;
  const RowBlock* blocks;
  int32_t first_block;
  int64_t block_count;
  const void* dy;
  int64_t dy_stride;
  int64_t d_out;
  const void* s;
  int64_t s_stride;
  const void* x;
  int64_t x_stride;
  int64_t d_in;
  void* dx;  // null: not wanted
  int64_t dx_stride;
  float* da;  // the group's sums; null: not wanted
  float* db;
  void* scratch;
};

// Columns [begin, end) of one gradient: the sums of its groups, in their order.
struct GradientArgs {
  const float* sums;
  int64_t groups;
  int64_t next;  // floats from one group's sums to the next
  int64_t rank;
  int64_t cols;
  int64_t begin;
  int64_t end;
  MatrixView grad;  // [rank, cols]
  bool add;         // to what is there
};

// What a product with an adapter's matrix sums along: the columns (x A^T, dy B) or the rank (s B^T, ds A).
enum class Along : int8_t { kColumns, kRank };

// Columns [begin, end) of rows of any dtype and strides, [rank, cols], in the form that the kernels read.
struct PackArgs {
  MatrixView source;
  Along along;
  int64_t rank;
  int64_t cols;
  int64_t begin;
  int64_t end;
  void* target;
};

// An AdamW update (Loshchilov and Hutter, 2019): m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
// p = keep p - step_size m / (root sqrt(v) + eps), for g = scale * gradient.
struct AdamWArgs {
  void* gradient;
  float* parameter;
  float* first;   // m
  float* second;  // v
  void* copy;     // of p; null: not wanted
  Scalar copy_type;
  float scale;
  float beta1;
  float beta2;
  float keep;       // 1 - learning rate * weight decay
  float step_size;  // learning rate / (1 - beta1^step)
  float root;       // 1 / sqrt(1 - beta2^step)
  float eps;
  bool clear;  // leaves zeros in the gradient
};

struct Kernels {
  Scalar compute;  // dtype of operands
  int64_t (*scratch_bytes)(int64_t max_rank);
  // 0: dense rows of the compute type, read in place where they are there
  int64_t (*packed_bytes)(Along along, int64_t rank, int64_t cols);
  void (*pack)(const PackArgs&);
  void (*forward)(const ForwardArgs&);
  int64_t (*sums_size)(int64_t rank, int64_t cols);  // floats of one group's sums
  void (*backward)(const BackwardArgs&);
  void (*write_gradient)(const GradientArgs&);
  // bits[i] keeps column 64 * i + bit of one row
  void (*keep_bits)(const Dropout&, uint32_t row, int64_t words, uint64_t* bits);
  // numbers [begin, end); the table's dtype is the gradient's. Returns the sum of its squares, unscaled.
  float (*adamw)(const AdamWArgs&, int64_t begin, int64_t end);
  // the sum of the squares of numbers [begin, end) of the table's dtype
  float (*squares)(const void* numbers, int64_t begin, int64_t end);
};

// Kernels of the best instruction set of this processor, or of the one chosen by name.
const Kernels& kernels(Scalar x_type);
std::string_view isa();
void use_isa(std::string_view name);

}  // namespace mlora::cpu
