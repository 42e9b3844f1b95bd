// What kernels see: plain pointers, strides and sizes. No torch here.
#pragma once

#include <cstdint>

namespace mlora {

enum class Scalar : int8_t { kFloat = 0, kBFloat16 = 1, kHalf = 2 };

inline int64_t element_size(Scalar type) { return type == Scalar::kFloat ? 4 : 2; }

// Of Philox4x32; seven are the fewest that pass all tests of BigCrush (Salmon et al., SC 2011).
constexpr int kPhiloxRounds = 7;

// Dropout of one adapter in one layer: Philox4x32-7, one counter for eight columns of one row.
// counter = (column / 8, row, layer, step); an element is dropped when its 16-bit number < threshold.
struct Dropout {
  uint32_t key0 = 0;
  uint32_t key1 = 0;
  uint32_t layer = 0;
  uint32_t step = 0;
  uint32_t threshold = 0;   // 0: nothing is dropped
  float keep_scale = 1.0f;  // 1 / (1 - threshold / 65536)
};

// A matrix with any strides, in elements.
struct MatrixView {
  void* data = nullptr;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
  Scalar type = Scalar::kFloat;
};

// At most kBlockRows rows of one segment; the cut is relative to the segment's start.
struct RowBlock {
  int64_t begin;  // first row of x
  int64_t rows;
  uint32_t philox_row;
  int32_t adapter;
  int32_t next;  // the adapter's next block, or -1
};

constexpr int64_t kBlockRows = 64;

// An adapter ready for the kernels: rows of A and of B transposed, dense and in the kernels' compute type.
struct AdapterView {
  int64_t rank = 0;
  float scaling = 0.0f;
  Dropout dropout;
  const void* a = nullptr;
  const void* b = nullptr;
  int64_t a_stride = 0;
  int64_t b_stride = 0;
  int32_t first_block = -1;
};

}  // namespace mlora
