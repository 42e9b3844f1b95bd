// What the forward and backward kernels share: scratch memory, products with x along its columns, operands.
#pragma once

#include <cstring>

#include "cpu/kernels.h"

namespace mlora::cpu::MLORA_ISA {

constexpr int64_t kGradColumns = 256;

// A lane adds at most 64 numbers before its sum joins the others', so rounding grows alike on every
// processor.
template <class Op>
constexpr int64_t kDotElements = 64 * Simd::kLanes * Op::kUnits;

// Rows of a panel do not share their cache sets.
template <class Op>
constexpr int64_t kPanelStride = kDotElements<Op> + 32;

inline int64_t units_of(int64_t elements, int64_t per_unit) { return (elements + per_unit - 1) / per_unit; }

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Hands out pieces of a task's scratch memory.
class Scratch {
 public:
  explicit Scratch(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(memory_);
    memory_ += aligned(count * static_cast<int64_t>(sizeof(T)));
    return piece;
  }

 private:
  char* memory_;
};

// Columns of y that one pass of the low-rank part covers: its rows of B stay in the nearest cache.
template <class Op>
constexpr int64_t kExpandColumns = 512 * Op::kUnits;

template <class Op>
int64_t scratch_bytes(int64_t max_rank) {
  const int64_t row_blocks = aligned(kBlockRows * max_rank * 4) * 2;
  const int64_t panel =
      aligned(Simd::kDotRows * kPanelStride<Op> * static_cast<int64_t>(sizeof(typename Op::Element))) +
      aligned(kBlockRows * words_of(kDotElements<Op>) * 8);
  const int64_t columns = aligned(kBlockRows * kGradColumns * 4) +
                          aligned(kBlockRows * words_of(kGradColumns) * 8) +
                          aligned(kBlockRows * max_rank * 4) + 2 * aligned(max_rank * kGradColumns * 4);
  const int64_t expand =
      Op::kUnits == 1 ? 0 : aligned(units_of(max_rank, Op::kUnits) * kExpandColumns<Op> * 4);
  const int64_t rows = row_blocks + (panel > expand ? panel : expand);
  return (rows > columns ? rows : columns) + 64;
}

// sums[i][j] = sum over columns of drop(rows)[i] * a[j].
template <class Op, typename T>
void shrink(const T* rows, int64_t stride, int64_t count, int64_t cols, const typename Op::Element* a,
            int64_t a_stride, int64_t rank, const Dropout& dropout, uint32_t philox_row, Scratch scratch,
            float* sums) {
  using Element = typename Op::Element;
  constexpr int64_t kChunk = kDotElements<Op>;
  constexpr int64_t kWords = kChunk / kWordColumns;
  Element* panel = scratch.take<Element>(Simd::kDotRows * kPanelStride<Op>);
  uint64_t* bits = scratch.take<uint64_t>(kBlockRows * kWords);
  for (int64_t c = 0; c < cols; c += kChunk) {
    const int64_t n = cols - c < kChunk ? cols - c : kChunk;
    if (dropout.threshold) {
      keep_bits_block(dropout, philox_row, count, c / kWordColumns, words_of(n), bits, kWords);
    }
    const int64_t panels = units_of(count, Simd::kDotRows);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t i = count * p / panels;
      const int64_t m = count * (p + 1) / panels - i;
      for (int64_t k = i + m; k < i + 2 * m && k < count; ++k) {
        prefetch_row(rows + k * stride + c, n);
      }
      int64_t x_stride = 0;
      const Element* x = stage_rows<Op, T>(rows + i * stride + c, stride, m, n,
                                           dropout.threshold ? bits + i * kWords : nullptr, kWords, panel,
                                           kPanelStride<Op>, &x_stride);
      dot_rows<Op>(x, x_stride, m, a + c, a_stride, rank, n, sums + i * rank, rank, c > 0);
    }
  }
}

// target[j] = sums[j] * scale in any storage type.
template <typename T>
void scale_row(const float* sums, int64_t n, float scale, T* target) {
  const Simd::Vec factor = Simd::set1(scale);
  int64_t j = 0;
  for (; j + Simd::kLanes <= n; j += Simd::kLanes) {
    Simd::store(target + j, Simd::mul(Simd::load(sums + j), factor));
  }
  if (j < n) {
    Simd::store(target + j, Simd::mul(Simd::load(sums + j, n - j), factor), n - j);
  }
}

// Rows of A or B along the rank as units, in the order of columns that Expand reads: single rows in place,
// pairs in `memory`.
template <class Op>
const typename Op::Unit* stage_operand(const typename Op::Element* rows, int64_t stride, int64_t rank,
                                       int64_t cols, typename Op::Unit* memory, int64_t* staged_stride) {
  if constexpr (Op::kUnits == 1) {
    *staged_stride = stride;
    return rows;
  } else {
    *staged_stride = (cols + 31) / 32 * 32;
    for (int64_t j = 0; j < rank; j += 2) {
      split_units(rows + j * stride, j + 1 < rank ? rows + (j + 1) * stride : nullptr, cols,
                  memory + j / 2 * *staged_stride);
    }
    return memory;
  }
}

}  // namespace mlora::cpu::MLORA_ISA
