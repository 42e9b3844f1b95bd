// The frozen product with the low-rank part inside, of bf16 and fp16 on sm_90a; torch-free.
//
// Letters: T rows, D = d_in, O = d_out, d the columns of the result, N adapters, R largest rank.
#pragma once

#include "cuda/kernels.h"

namespace mlora::cuda {

// Where the rows of an adapter begin in a factor page, and how many of them are ranks.
struct FactorPlace {
  int32_t first;
  int32_t ranks;
};

// The factors F [r, d] of all adapters of a layer in the dtype of rows, one below the other: B^T, or A. Each
// is padded with rows of zeros to a multiple of 16.
struct FactorPage {
  Rows rows;  // [row_count, d]
  int32_t row_count;
  const FactorPlace* places;  // [N]
};

// y = x W^T + s B^T + bias, or dx = dy W + keep(ds A); the low-rank part is each row's own adapter's.
struct ProductArguments {
  Scalar type;  // not fp32
  bool forward;
  Rows rows;         // x [T, D], or dy [T, O]
  Rows weight;       // W [O, D]
  OutRows out;       // y [T, O], or dx [T, D]
  const void* bias;  // [O], or null; forward only
  PartView parts;    // without starts: the frozen product alone, and nothing below is read
  Rows s;            // s or ds [T, R]; zeros from an adapter's rank on
  FactorPage factor;
  DropoutTables dropout;  // backward only
  const uint32_t* keep;   // of this layer [T, D / 32, rounded up], as shrink has stored it; null: drawn anew
  int64_t rows_total;
  int d_in;
  int d_out;
  int ranks;
  int cluster;          // 1, or 2: two blocks share what they read of W
  int group;            // row tiles of a cluster that stay together, for the L2 cache; at least 1
  int multiprocessors;  // at most so many are used; 0: all
};

// Returns a CUDA error code: cudaErrorNotSupported (801), and nothing is launched, where the device is not
// sm_90, the build has no code for sm_90a, rows are fp32, the page of factors is empty, or a matrix or bias
// does not begin, with each of its rows, at a multiple of 16 bytes.
int launch_product(const ProductArguments& arguments, const Queue& queue);

}  // namespace mlora::cuda
