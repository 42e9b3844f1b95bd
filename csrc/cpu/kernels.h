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

// One block of rows: ds = keep_scale * scaling * dy B, and both operands that the column tasks broadcast.
struct GradRowsArgs {
  const AdapterView* adapter;
  const RowBlock* block;
  const void* dy;
  int64_t dy_stride;
  const void* s;
  int64_t s_stride;
  int64_t d_out;
  void* ds_rows;  // [T, ds_rows_stride] units along the rank; null when neither dx nor da is needed
  int64_t ds_rows_stride;
  void* ds_cols;  // units along the rows, [pairs or T, cols_stride]; null when da is not needed
  void* s_cols;   // the same for s; null when db is not needed
  int64_t cols_stride;
  void* scratch;
};

// Columns [begin, end) of all rows of one adapter: grad = p^T drop(rows), and dx += drop'(ds A).
struct GradColumnsArgs {
  const AdapterView* adapter;
  const RowBlock* blocks;
  const void* rows;  // x or dy
  int64_t rows_stride;
  int64_t begin;
  int64_t end;
  const void* p_cols;  // ds_cols or s_cols; null: no gradient wanted
  int64_t p_stride;
  MatrixView grad;  // [rank, columns]
  bool dropout;
  void* dx;  // null: only the gradient
  int64_t dx_stride;
  const void* ds_rows;
  int64_t ds_rows_stride;
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

struct Kernels {
  const char* isa;
  int64_t units;    // elements of the compute type in one 32-bit lane: 1 (fp32) or 2 (bf16 pairs)
  Scalar compute;   // dtype of packed operands
  int64_t columns;  // columns of one gradient task
  int64_t (*scratch_bytes)(int64_t max_rank);
  void (*forward)(const ForwardArgs&);
  void (*grad_rows)(const GradRowsArgs&);
  void (*grad_columns)(const GradColumnsArgs&);
  void (*convert_rows)(const ConvertArgs&);
  // bits[i] keeps column 64 * i + bit of one row
  void (*keep_bits)(const Dropout&, uint32_t row, int64_t words, uint64_t* bits);
};

// Kernels of the best instruction set of this processor, or of the one chosen by name.
const Kernels& kernels(Scalar x_type);
const char* isa();
void use_isa(std::string_view name);

}  // namespace mlora::cpu
