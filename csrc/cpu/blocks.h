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
  const int64_t ranks = 3 * aligned(kBlockRows * (max_rank + Op::kUnits) * 4);
  const int64_t panel =
      aligned(Simd::kDotRows * kPanelStride<Op> * static_cast<int64_t>(sizeof(typename Op::Element))) +
      aligned(kBlockRows * words_of(kDotElements<Op>) * 8);
  const int64_t columns =
      aligned(kBlockRows * kGradColumns * 4) + aligned(kBlockRows * words_of(kGradColumns) * 8);
  return ranks + (panel > columns ? panel : columns) + 64;
}

// sums[i][j] (+)= sum over n <= kDotElements columns from c of drop(rows)[i] * a[j].
template <class Op, typename T>
void shrink(const T* rows, int64_t stride, int64_t count, int64_t c, int64_t n, const typename Op::Element* a,
            int64_t a_stride, int64_t rank, const Dropout& dropout, uint32_t philox_row, Scratch scratch,
            float* sums) {
  using Element = typename Op::Element;
  constexpr int64_t kWords = kDotElements<Op> / kWordColumns;
  Element* panel = scratch.take<Element>(Simd::kDotRows * kPanelStride<Op>);
  uint64_t* bits = scratch.take<uint64_t>(kBlockRows * kWords);
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

// Columns of packed pairs of rows.
inline int64_t padded_columns(int64_t cols) { return (cols + 31) / 32 * 32; }

// An adapter's matrix as the units along the rank that Expand reads: rows in place, or pairs of rows, packed.
template <class Op>
struct RankOperand {
  const typename Op::Unit* data;
  int64_t stride;

  RankOperand(const void* rows, int64_t row_stride, int64_t cols)
      : data(static_cast<const typename Op::Unit*>(rows)),
        stride(Op::kUnits == 1 ? row_stride : padded_columns(cols)) {}
};

inline void keep_bits(const Dropout& dropout, uint32_t row, int64_t words, uint64_t* bits) {
  keep_bits_block(dropout, row, 1, 0, words, bits, words);
}

}  // namespace mlora::cpu::MLORA_ISA
