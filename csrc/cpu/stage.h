// Bringing rows into the form that the tiles read: dropout by selection, conversion, pairs of rows
// interleaved.
#pragma once

#include <type_traits>

#include "params.h"

namespace mlora::cpu::MLORA_ISA {

constexpr int64_t kWordColumns = 64;

inline int64_t words_of(int64_t cols) { return (cols + kWordColumns - 1) / kWordColumns; }

// Copy one row of x to the compute type; dropped elements become zero.
template <typename T>
void copy_kept(const T* source, int64_t cols, const uint64_t* keep, float* target) {
  int64_t c = 0;
  for (; c + kWordColumns <= cols; c += kWordColumns) {
    const uint64_t bits = keep ? keep[c / kWordColumns] : ~uint64_t{0};
#pragma GCC unroll 16
    for (int lane = 0; lane < kWordColumns; lane += Simd::kLanes) {
      Simd::store(target + c + lane, Simd::keep(Simd::load(source + c + lane), bits >> lane));
    }
  }
  for (; c < cols; c += Simd::kLanes) {
    const int64_t n = cols - c < Simd::kLanes ? cols - c : Simd::kLanes;
    const Simd::Vec v = Simd::load(source + c, n);
    Simd::store(target + c, keep ? Simd::keep(v, keep[c / kWordColumns] >> (c % kWordColumns)) : v, n);
  }
}

// Rows in the compute type, row by row. Returns where they are: the source itself when nothing has to change.
template <class Op, typename T>
const typename Op::Element* stage_rows(const T* source, int64_t stride, int64_t rows, int64_t cols,
                                       const uint64_t* keep, int64_t keep_stride,
                                       typename Op::Element* scratch, int64_t scratch_stride,
                                       int64_t* staged_stride) {
  if constexpr (std::is_same_v<T, typename Op::Element>) {
    if (!keep) {
      *staged_stride = stride;
      return source;
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    copy_kept(source + i * stride, cols, keep ? keep + i * keep_stride : nullptr,
              scratch + i * scratch_stride);
  }
  *staged_stride = scratch_stride;
  return scratch;
}

// Rows as units along the sum over rows: single rows, or pairs of them interleaved.
template <class Op, typename T>
const typename Op::Unit* stage_columns(const T* source, int64_t stride, int64_t rows, int64_t cols,
                                       const uint64_t* keep, int64_t keep_stride, typename Op::Unit* scratch,
                                       int64_t scratch_stride, int64_t* staged_stride) {
  if constexpr (Op::kUnits == 1) {
    return stage_rows<Op, T>(source, stride, rows, cols, keep, keep_stride, scratch, scratch_stride,
                             staged_stride);
  } else {
    for (int64_t i = 0; i < rows; i += 2) {
      const bool paired = i + 1 < rows;
      interleave(source + i * stride, paired ? source + (i + 1) * stride : nullptr, cols,
                 keep ? keep + i * keep_stride : nullptr,
                 keep && paired ? keep + (i + 1) * keep_stride : nullptr, scratch + i / 2 * scratch_stride);
    }
    *staged_stride = scratch_stride;
    return scratch;
  }
}

// One row of an adapter's matrix in the compute type, from any dtype and strides.
template <typename T, typename Element>
void convert_row(const T* source, int64_t stride, int64_t cols, Element* target) {
  if (stride != 1) {
    for (int64_t c = 0; c < cols; ++c) {
      from_float(to_float(source[c * stride]), target + c);
    }
    return;
  }
  int64_t c = 0;
  for (; c + Simd::kLanes <= cols; c += Simd::kLanes) {
    Simd::store(target + c, Simd::load(source + c));
  }
  if (c < cols) {
    Simd::store(target + c, Simd::load(source + c, cols - c), cols - c);
  }
}

template <typename Element>
void convert_row(const MatrixView& view, int64_t row, int64_t col, int64_t cols, Element* target) {
  const int64_t offset = row * view.row_stride + col * view.col_stride;
  switch (view.type) {
    case Scalar::kFloat:
      return convert_row(static_cast<const float*>(view.data) + offset, view.col_stride, cols, target);
    case Scalar::kBFloat16:
      return convert_row(static_cast<const BF16*>(view.data) + offset, view.col_stride, cols, target);
    case Scalar::kHalf:
      return convert_row(static_cast<const Half*>(view.data) + offset, view.col_stride, cols, target);
  }
}

// sums += columns of one row, for at most 256 of them.
inline void add_row(const MatrixView& view, int64_t row, int64_t col, int64_t cols, float* sums) {
  float values[256];
  convert_row(view, row, col, cols, values);
  for (int64_t c = 0; c < cols; ++c) {
    sums[c] += values[c];
  }
}

// One row of fp32 sums into a matrix of any dtype and strides.
template <typename T>
void write_row(const float* source, int64_t cols, T* target, int64_t stride) {
  if (stride == 1) {
    return convert_row(source, 1, cols, target);
  }
  for (int64_t c = 0; c < cols; ++c) {
    from_float(source[c], target + c * stride);
  }
}

inline void write_row(const float* source, int64_t cols, const MatrixView& view, int64_t row, int64_t col) {
  const int64_t offset = row * view.row_stride + col * view.col_stride;
  switch (view.type) {
    case Scalar::kFloat:
      return write_row(source, cols, static_cast<float*>(view.data) + offset, view.col_stride);
    case Scalar::kBFloat16:
      return write_row(source, cols, static_cast<BF16*>(view.data) + offset, view.col_stride);
    case Scalar::kHalf:
      return write_row(source, cols, static_cast<Half*>(view.data) + offset, view.col_stride);
  }
}

}  // namespace mlora::cpu::MLORA_ISA
