// The kernels over one block of rows, or over the columns of one adapter.
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
                          2 * aligned(max_rank * kGradColumns * 4);
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
      int64_t x_stride;
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

template <class Op, typename T>
void forward(const ForwardArgs& args) {
  using Element = typename Op::Element;
  using Unit = typename Op::Unit;
  const AdapterView& adapter = *args.adapter;
  const RowBlock& block = *args.block;
  const int64_t rank = adapter.rank;
  const int64_t units = units_of(rank, Op::kUnits);
  Scratch scratch(args.scratch);
  float* sums = scratch.take<float>(block.rows * rank);
  Unit* s_units = scratch.take<Unit>(block.rows * units);
  shrink<Op, T>(static_cast<const T*>(args.x) + block.begin * args.x_stride, args.x_stride, block.rows,
                args.d_in, static_cast<const Element*>(adapter.a), adapter.a_stride, rank, adapter.dropout,
                block.philox_row, scratch, sums);
  const float scale = adapter.scaling * adapter.dropout.keep_scale;
  for (int64_t i = 0; i < block.rows; ++i) {
    T* s = static_cast<T*>(args.s) + (block.begin + i) * args.s_stride;
    scale_row(sums + i * rank, rank, scale, s);
    std::memset(static_cast<void*>(s + rank), 0, static_cast<size_t>(args.s_stride - rank) * sizeof(T));
    Element* row = reinterpret_cast<Element*>(s_units + i * units);
    convert_row(s, 1, rank, row);
    if (rank % Op::kUnits) {
      from_float(0.0f, row + rank);
    }
  }
  const Element* b = static_cast<const Element*>(adapter.b);
  T* y = static_cast<T*>(args.y) + block.begin * args.y_stride;
  Unit* memory = Op::kUnits == 1 ? nullptr : scratch.take<Unit>(units * kExpandColumns<Op>);
  for (int64_t c = 0; c < args.d_out; c += kExpandColumns<Op>) {
    const int64_t n = args.d_out - c < kExpandColumns<Op> ? args.d_out - c : kExpandColumns<Op>;
    int64_t stride;
    const Unit* q = stage_operand<Op>(b + c, adapter.b_stride, rank, n, memory, &stride);
    broadcast_gemm<Op>({s_units, units, 1, block.rows, q, stride, units, n},
                       typename Expand<Op, T>::Add{y + c, args.y_stride});
  }
}

// Rows of units along the rank -> units along the rows.
template <class Op, typename T>
void transpose_units(const T* rows, int64_t stride, int64_t count, int64_t rank, typename Op::Unit* target,
                     int64_t target_stride) {
  int64_t staged_stride;
  const auto* staged =
      stage_columns<Op, T>(rows, stride, count, rank, nullptr, 0, target, target_stride, &staged_stride);
  if (staged != target) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(target + i * target_stride, staged + i * staged_stride,
                  static_cast<size_t>(rank) * sizeof(*target));
    }
  }
}

template <class Op, typename T>
void grad_rows(const GradRowsArgs& args) {
  using Element = typename Op::Element;
  using Unit = typename Op::Unit;
  const AdapterView& adapter = *args.adapter;
  const RowBlock& block = *args.block;
  const int64_t rank = adapter.rank;
  if (args.s_cols) {
    transpose_units<Op, T>(
        static_cast<const T*>(args.s) + block.begin * args.s_stride, args.s_stride, block.rows, rank,
        static_cast<Unit*>(args.s_cols) + block.pair_begin * args.cols_stride, args.cols_stride);
  }
  if (!args.ds_rows) {
    return;
  }
  Scratch scratch(args.scratch);
  float* sums = scratch.take<float>(block.rows * rank);
  shrink<Op, T>(static_cast<const T*>(args.dy) + block.begin * args.dy_stride, args.dy_stride, block.rows,
                args.d_out, static_cast<const Element*>(adapter.b), adapter.b_stride, rank, Dropout{}, 0,
                scratch, sums);
  const float scale = adapter.scaling * adapter.dropout.keep_scale;
  Unit* ds = static_cast<Unit*>(args.ds_rows) + block.begin * args.ds_rows_stride;
  for (int64_t i = 0; i < block.rows; ++i) {
    Element* row = reinterpret_cast<Element*>(ds + i * args.ds_rows_stride);
    scale_row(sums + i * rank, rank, scale, row);
    if (rank % Op::kUnits) {
      from_float(0.0f, row + rank);
    }
  }
  if (args.ds_cols && args.ds_cols != args.ds_rows) {
    transpose_units<Op, Element>(
        reinterpret_cast<const Element*>(ds), args.ds_rows_stride * Op::kUnits, block.rows, rank,
        static_cast<Unit*>(args.ds_cols) + block.pair_begin * args.cols_stride, args.cols_stride);
  }
}

// One block's rows of one column task, dropped and in the form that the gradient's tiles read.
template <class Op>
struct StagedBlock {
  const typename Op::Unit* rows;
  int64_t stride;
  uint64_t* bits;  // null: nothing is dropped
  int64_t words;
};

template <class Op, typename T>
StagedBlock<Op> stage_block(const GradColumnsArgs& args, const RowBlock& block, Scratch& scratch) {
  using Unit = typename Op::Unit;
  constexpr int64_t kGroup = 8;  // rows fetched ahead
  const Dropout& dropout = args.adapter->dropout;
  const int64_t cols = args.end - args.begin;
  StagedBlock<Op> staged{nullptr, 0, nullptr, words_of(cols)};
  if (args.dropout && dropout.threshold) {
    staged.bits = scratch.take<uint64_t>(block.rows * staged.words);
    keep_bits_block(dropout, block.philox_row, block.rows, args.begin / kWordColumns, staged.words,
                    staged.bits, staged.words);
  }
  Unit* memory = scratch.take<Unit>(block.rows * cols);
  const T* rows = static_cast<const T*>(args.rows) + block.begin * args.rows_stride + args.begin;
  T* dx = args.dx ? static_cast<T*>(args.dx) + block.begin * args.dx_stride + args.begin : nullptr;
  for (int64_t i = 0; i < block.rows; i += kGroup) {
    const int64_t n = block.rows - i < kGroup ? block.rows - i : kGroup;
    for (int64_t ahead = i + n; ahead < i + n + kGroup && ahead < block.rows; ++ahead) {
      prefetch_row(rows + ahead * args.rows_stride, cols);
    }
    for (int64_t k = i; dx && k < i + n; ++k) {
      prefetch_row(dx + k * args.dx_stride, cols);
    }
    const uint64_t* bits = staged.bits ? staged.bits + i * staged.words : nullptr;
    if (args.p_cols) {
      const Unit* piece =
          stage_columns<Op, T>(rows + i * args.rows_stride, args.rows_stride, n, cols, bits, staged.words,
                               memory + i / Op::kUnits * cols, cols, &staged.stride);
      staged.rows = i == 0 ? piece : staged.rows;
    }
  }
  return staged;
}

template <class Op, typename T>
void grad_block(const GradColumnsArgs& args, const RowBlock& block, const typename Op::Unit* a,
                int64_t a_stride, Scratch scratch, float* sums) {
  using Unit = typename Op::Unit;
  const AdapterView& adapter = *args.adapter;
  const int64_t cols = args.end - args.begin;
  const StagedBlock<Op> staged = stage_block<Op, T>(args, block, scratch);
  if (args.p_cols) {
    const Unit* p = static_cast<const Unit*>(args.p_cols) + block.pair_begin * args.p_stride;
    constexpr int64_t kSlice = Simd::kTileVecs * Simd::kLanes;
    for (int64_t c = 0; c < cols; c += kSlice) {
      const BroadcastArgs<Op> outer{p,
                                    1,
                                    args.p_stride,
                                    adapter.rank,
                                    staged.rows + c,
                                    staged.stride,
                                    units_of(block.rows, Op::kUnits),
                                    cols - c < kSlice ? cols - c : kSlice};
      broadcast_gemm<Op>(outer, AddToSums{{sums + c, cols}});
    }
  }
  if (args.dx) {
    const BroadcastArgs<Op> expand{static_cast<const Unit*>(args.ds_rows) + block.begin * args.ds_rows_stride,
                                   args.ds_rows_stride,
                                   1,
                                   block.rows,
                                   a,
                                   a_stride,
                                   units_of(adapter.rank, Op::kUnits),
                                   cols};
    T* dx = static_cast<T*>(args.dx) + block.begin * args.dx_stride + args.begin;
    if (staged.bits) {
      broadcast_gemm<Op>(expand,
                         typename Expand<Op, T>::Kept{{dx, args.dx_stride}, staged.bits, staged.words});
    } else {
      broadcast_gemm<Op>(expand, typename Expand<Op, T>::Add{dx, args.dx_stride});
    }
  }
}

template <class Op, typename T>
void grad_columns(const GradColumnsArgs& args) {
  using Element = typename Op::Element;
  const int64_t rank = args.adapter->rank;
  const int64_t cols = args.end - args.begin;
  Scratch scratch(args.scratch);
  float* sums = scratch.take<float>(rank * cols);
  if (args.p_cols) {
    std::memset(sums, 0, static_cast<size_t>(rank * cols) * sizeof(float));
  }
  const typename Op::Unit* a = nullptr;
  int64_t a_stride = 0;
  if (args.dx && args.adapter->first_block >= 0) {
    auto* memory = scratch.take<typename Op::Unit>(units_of(rank, Op::kUnits) * kGradColumns);
    a = stage_operand<Op>(static_cast<const Element*>(args.adapter->a) + args.begin, args.adapter->a_stride,
                          rank, cols, memory, &a_stride);
  }
  for (int32_t i = args.adapter->first_block; i >= 0; i = args.blocks[i].next) {
    grad_block<Op, T>(args, args.blocks[i], a, a_stride, scratch, sums);
  }
  if (args.p_cols) {
    for (int64_t j = 0; j < rank; ++j) {
      write_row(sums + j * cols, cols, args.grad, j, args.begin);
    }
  }
}

template <class Op>
void convert_rows(const ConvertArgs& args) {
  for (int64_t j = 0; j < args.rows; ++j) {
    convert_row(args.source, j, args.col_begin, args.col_end - args.col_begin,
                static_cast<typename Op::Element*>(args.target) + j * args.target_stride + args.col_begin);
  }
}

inline void keep_bits(const Dropout& dropout, uint32_t row, int64_t words, uint64_t* bits) {
  keep_bits_block(dropout, row, 1, 0, words, bits, words);
}

template <class Op, typename T>
constexpr Kernels make_kernels(const char* isa) {
  return Kernels{.isa = isa,
                 .units = Op::kUnits,
                 .compute = Op::kUnits == 1 ? Scalar::kFloat : Scalar::kBFloat16,
                 .columns = kGradColumns,
                 .scratch_bytes = scratch_bytes<Op>,
                 .forward = forward<Op, T>,
                 .grad_rows = grad_rows<Op, T>,
                 .grad_columns = grad_columns<Op, T>,
                 .convert_rows = convert_rows<Op>,
                 .keep_bits = keep_bits};
}

}  // namespace mlora::cpu::MLORA_ISA
