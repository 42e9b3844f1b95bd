// The frozen product with the low-rank part inside, of bf16 and fp16 on sm_90a; torch-free.
//
// Letters: T rows, D = d_in, O = d_out, d the columns of the result, N adapters, R largest rank.
#pragma once

#include "cuda/kernels.h"

namespace mlora::cuda {

// The factors F [r, d] of all adapters of a layer in the dtype of rows: B^T, or A. Those of adapter i begin
// at row i pitch; behind them stand zeros up to a multiple of 16 rows, and anything from there on.
struct FactorPage {
  Rows rows;                 // [N pitch, d]
  const FactorRow* factors;  // [N]
  int32_t adapters;
  int32_t pitch;  // R, padded to a multiple of 16
};

// The rows of one layer's page.
struct PageOut {
  void* data;  // [N pitch, columns], dense
  int columns;
};

struct PageArguments {
  Scalar type;  // of the pages; not fp32
  FactorTable factor;
  PageOut out[kMostLayers];  // columns are multiples of 8
  int layers;
  int pitch;
};

// y = x W^T + s B^T + bias, or dx = dy W + keep(ds A), or dx += that; the low-rank part is each row's own
// adapter's.
struct ProductArguments {
  Scalar type;  // not fp32
  bool forward;
  bool add;          // to what `out` holds; backward only
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
  int cluster;  // 1, or 2: two blocks share what they read of W
  int group;    // row tiles of a cluster that stay together, for the L2 cache; at least 1
  int left;     // multiprocessors that are left to other launches
};

int launch_pages(const PageArguments& arguments, const Queue& queue);

// Whether the device is sm_90 and the build has code for sm_90a.
bool has_product(const Queue& queue);

// Whether this product can be launched. Not where `has_product` says so, rows are fp32, the page of factors
// is empty, rows of a matrix overlap, or a matrix or bias does not
// begin, with each of its rows, at a multiple of 16 bytes.
bool serves_product(const ProductArguments& arguments, const Queue& queue);

// Returns a CUDA error code; cudaErrorNotSupported (801), and nothing is launched, where it is not served.
int launch_product(const ProductArguments& arguments, const Queue& queue);

}  // namespace mlora::cuda
