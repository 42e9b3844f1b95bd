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

// One block of rows: ds = keep_scale * scaling * dy B.
struct GradRowsArgs {
  const AdapterView* adapter;
  const RowBlock* block;
  const void* dy;
  int64_t dy_stride;
  int64_t d_out;
  void* ds;  // [T, ds_stride] units along the rank
  int64_t ds_stride;
  void* scratch;
};

// Columns [begin, end) of one adapter's dB = dy^T s.
struct GradBArgs {
  const AdapterView* adapter;
  const RowBlock* blocks;
  const void* dy;
  int64_t dy_stride;
  const void* s;
  int64_t s_stride;
  int64_t begin;
  int64_t end;
  MatrixView grad;  // [rank, d_out]
  void* scratch;
};

// Columns [begin, end) of one adapter's dA = ds^T drop(x), and of dx += drop'(ds A).
struct GradAArgs {
  const AdapterView* adapter;
  const RowBlock* blocks;
  const void* x;
  int64_t x_stride;
  const void* ds;  // as GradRowsArgs wrote it
  int64_t ds_stride;
  int64_t begin;
  int64_t end;
  MatrixView grad;  // [rank, d_in]; no data: not wanted
  void* dx;         // null: not wanted
  int64_t dx_stride;
  void* scratch;
};

// Columns of rows of any dtype and strides -> dense rows in the compute type.
struct ConvertArgs {
  MatrixView source;
  int64_t rows;
  int64_t col_begin;
  int64_t col_end;
  void* target;
  int64_t target_stride;
};

// An AdamW update (Loshchilov and Hutter, 2019): m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
// p = keep p - step_size m / (root sqrt(v) + eps), for g = scale * gradient.
struct AdamWArgs {
  const void* gradient;
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
};

struct Kernels {
  const char* isa;
  int64_t units;    // elements of the compute type in one 32-bit lane: 1 (fp32) or 2 (bf16 pairs)
  Scalar compute;   // dtype of packed operands
  int64_t columns;  // columns of one gradient task
  int64_t (*scratch_bytes)(int64_t max_rank);
  void (*forward)(const ForwardArgs&);
  void (*grad_rows)(const GradRowsArgs&);
  void (*grad_b)(const GradBArgs&);
  void (*grad_a)(const GradAArgs&);
  void (*convert_rows)(const ConvertArgs&);
  // bits[i] keeps column 64 * i + bit of one row
  void (*keep_bits)(const Dropout&, uint32_t row, int64_t words, uint64_t* bits);
  // numbers [begin, end); the table's dtype is the gradient's. Returns the sum of its squares, unscaled.
  float (*adamw)(const AdamWArgs&, int64_t begin, int64_t end);
};

// Kernels of the best instruction set of this processor, or of the one chosen by name.
const Kernels& kernels(Scalar x_type);
const char* isa();
void use_isa(std::string_view name);

}  // namespace mlora::cpu
