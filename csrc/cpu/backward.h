// Backward: ds by blocks of rows, then dB, and dA with dx, by columns of one adapter.
#pragma once

#include "cpu/blocks.h"

namespace mlora::cpu::MLORA_ISA {

// ds = keep_scale scaling dy B, in the compute type.
template <class Op, typename T>
void grad_rows(const GradRowsArgs& args) {
  using Element = typename Op::Element;
  const AdapterView& adapter = *args.adapter;
  const RowBlock& block = *args.block;
  const int64_t rank = adapter.rank;
  Scratch scratch(args.scratch);
  float* sums = scratch.take<float>(block.rows * rank);
  shrink<Op, T>(static_cast<const T*>(args.dy) + block.begin * args.dy_stride, args.dy_stride, block.rows,
                args.d_out, static_cast<const Element*>(adapter.b), adapter.b_stride, rank, Dropout{}, 0,
                scratch, sums);
  const float scale = adapter.scaling * adapter.dropout.keep_scale;
  auto* ds = static_cast<typename Op::Unit*>(args.ds) + block.begin * args.ds_stride;
  for (int64_t i = 0; i < block.rows; ++i) {
    Element* row = reinterpret_cast<Element*>(ds + i * args.ds_stride);
    scale_row(sums + i * rank, rank, scale, row);
    if (rank % Op::kUnits) {
      from_float(0.0f, row + rank);
    }
  }
}

// One gradient's columns [begin, end): sums[j][c] over the rows of an adapter's blocks, one block at a time.
template <class Op>
class GradSums {
 public:
  using Unit = typename Op::Unit;

  GradSums(int64_t rank, int64_t cols, Scratch& scratch)
      : rank_(rank), cols_(cols), sums_(scratch.take<float>(rank * cols)) {}

  // p is [rows, rank]; `q` holds the block's rows as units along them.
  template <typename P>
  void add(const P* p, int64_t p_stride, int64_t rows, const Unit* q, int64_t q_stride, Scratch scratch) {
    int64_t stride = 0;
    const Unit* units = stage_columns<Op, P>(p, p_stride, rows, rank_, nullptr, 0,
                                             scratch.take<Unit>(rows * rank_), rank_, &stride);
    constexpr int64_t kSlice = Simd::kTileVecs * Simd::kLanes;
    for (int64_t c = 0; c < cols_; c += kSlice) {
      const int64_t n = cols_ - c < kSlice ? cols_ - c : kSlice;
      const BroadcastArgs<Op> outer{units, 1, stride, rank_, q + c, q_stride, units_of(rows, Op::kUnits), n};
      if (empty_) {
        broadcast_gemm<Op>(outer, SetSums{{sums_ + c, cols_}});
      } else {
        broadcast_gemm<Op>(outer, AddToSums{{sums_ + c, cols_}});
      }
    }
    empty_ = false;
  }

  void write(const MatrixView& grad, int64_t begin) {
    if (empty_) {
      std::memset(sums_, 0, static_cast<size_t>(rank_ * cols_) * sizeof(float));
    }
    for (int64_t j = 0; j < rank_; ++j) {
      write_row(sums_ + j * cols_, cols_, grad, j, begin);
    }
  }

 private:
  int64_t rank_;
  int64_t cols_;
  float* sums_;
  bool empty_ = true;
};

constexpr int64_t kRowsAhead = 8;

template <typename T>
void prefetch_rows(const T* rows, int64_t stride, int64_t begin, int64_t end, int64_t cols) {
  for (int64_t i = begin; i < end; ++i) {
    prefetch_row(rows + i * stride, cols);
  }
}

// A block's columns as units along the rows; fetches the rows ahead, and those of dx, which
// come next.
template <class Op, typename T>
const typename Op::Unit* stage_block(const T* rows, int64_t stride, int64_t count, int64_t cols,
                                     const uint64_t* bits, int64_t words, T* dx, int64_t dx_stride,
                                     typename Op::Unit* memory, int64_t* staged_stride) {
  const typename Op::Unit* staged = nullptr;
  for (int64_t i = 0; i < count; i += kRowsAhead) {
    const int64_t n = count - i < kRowsAhead ? count - i : kRowsAhead;
    const int64_t ahead = count - i - n < kRowsAhead ? count - i - n : kRowsAhead;
    prefetch_rows(rows, stride, i + n, i + n + ahead, cols);
    if (dx) {
      prefetch_rows(dx, dx_stride, i, i + n, cols);
    }
    const auto* piece =
        stage_columns<Op, T>(rows + i * stride, stride, n, cols, bits ? bits + i * words : nullptr, words,
                             memory + i / Op::kUnits * cols, cols, staged_stride);
    staged = i == 0 ? piece : staged;
  }
  return staged;
}

// dB = dy^T s
template <class Op, typename T>
void grad_b(const GradBArgs& args) {
  const int64_t cols = args.end - args.begin;
  Scratch scratch(args.scratch);
  GradSums<Op> sums(args.adapter->rank, cols, scratch);
  auto* memory = scratch.take<typename Op::Unit>(kBlockRows * cols);
  for (int32_t i = args.adapter->first_block; i >= 0; i = args.blocks[i].next) {
    const RowBlock& block = args.blocks[i];
    const T* dy = static_cast<const T*>(args.dy) + block.begin * args.dy_stride + args.begin;
    int64_t stride = 0;
    const auto* q =
        stage_block<Op, T>(dy, args.dy_stride, block.rows, cols, nullptr, 0, nullptr, 0, memory, &stride);
    sums.add(static_cast<const T*>(args.s) + block.begin * args.s_stride, args.s_stride, block.rows, q,
             stride, scratch);
  }
  sums.write(args.grad, args.begin);
}

// dA = ds^T drop(x), and dx += drop'(ds A): both under one mask.
template <class Op, typename T>
void grad_a(const GradAArgs& args) {
  using Element = typename Op::Element;
  using Unit = typename Op::Unit;
  const AdapterView& adapter = *args.adapter;
  const int64_t rank = adapter.rank;
  const int64_t cols = args.end - args.begin;
  const int64_t words = words_of(cols);
  Scratch scratch(args.scratch);
  GradSums<Op> sums(rank, cols, scratch);
  const Unit* a = nullptr;
  int64_t a_stride = 0;
  if (args.dx && adapter.first_block >= 0) {
    a = stage_operand<Op>(static_cast<const Element*>(adapter.a) + args.begin, adapter.a_stride, rank, cols,
                          scratch.take<Unit>(units_of(rank, Op::kUnits) * kGradColumns), &a_stride);
  }
  uint64_t* bits = adapter.dropout.threshold ? scratch.take<uint64_t>(kBlockRows * words) : nullptr;
  Unit* memory = scratch.take<Unit>(kBlockRows * cols);
  for (int32_t i = adapter.first_block; i >= 0; i = args.blocks[i].next) {
    const RowBlock& block = args.blocks[i];
    if (bits) {
      keep_bits_block(adapter.dropout, block.philox_row, block.rows, args.begin / kWordColumns, words, bits,
                      words);
    }
    const Unit* ds = static_cast<const Unit*>(args.ds) + block.begin * args.ds_stride;
    T* dx = args.dx ? static_cast<T*>(args.dx) + block.begin * args.dx_stride + args.begin : nullptr;
    if (args.grad.data) {
      const T* x = static_cast<const T*>(args.x) + block.begin * args.x_stride + args.begin;
      int64_t stride = 0;
      const Unit* q = stage_block<Op, T>(x, args.x_stride, block.rows, cols, bits, words, dx, args.dx_stride,
                                         memory, &stride);
      sums.add(reinterpret_cast<const Element*>(ds), args.ds_stride * Op::kUnits, block.rows, q, stride,
               scratch);
    }
    if (dx) {
      const BroadcastArgs<Op> expand{
          ds, args.ds_stride, 1, block.rows, a, a_stride, units_of(rank, Op::kUnits), cols};
      if (bits) {
        broadcast_gemm<Op>(expand, typename Expand<Op, T>::Kept{{dx, args.dx_stride}, bits, words});
      } else {
        broadcast_gemm<Op>(expand, typename Expand<Op, T>::Add{dx, args.dx_stride});
      }
    }
  }
  if (args.grad.data) {
    sums.write(args.grad, args.begin);
  }
}

}  // namespace mlora::cpu::MLORA_ISA
