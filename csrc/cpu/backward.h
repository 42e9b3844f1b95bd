// Backward of a group of one adapter's blocks, block by block: dy is read once, then x and dx.
#pragma once

#include "cpu/blocks.h"

namespace mlora::cpu::MLORA_ISA {

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

// One block of a backward call, with the memory that it works in.
template <class Op, typename T>
class BlockBackward {
 public:
  using Element = typename Op::Element;
  using Unit = typename Op::Unit;

  BlockBackward(const BackwardArgs& args, const RowBlock& block, bool first)
      : args_(args),
        adapter_(*args.adapter),
        block_(block),
        first_(first),
        rank_(adapter_.rank),
        units_(units_of(rank_, Op::kUnits)),
        scratch_(args.scratch),
        sums_(scratch_.take<float>(block.rows * rank_)),
        ds_(scratch_.take<Unit>(block.rows * units_)),
        left_memory_(scratch_.take<Unit>(block.rows * rank_)) {}

  // dB, and the sums of ds
  void read_dy() {
    const T* dy = static_cast<const T*>(args_.dy) + block_.begin * args_.dy_stride;
    if (args_.db) {
      stage_left(static_cast<const T*>(args_.s) + block_.begin * args_.s_stride, args_.s_stride);
    }
    Scratch scratch = scratch_;
    Unit* memory = scratch.take<Unit>(kBlockRows * kGradColumns);
    for (int64_t c = 0; c < args_.d_out; c += kDotElements<Op>) {
      const int64_t n = args_.d_out - c < kDotElements<Op> ? args_.d_out - c : kDotElements<Op>;
      if (args_.dx || args_.da) {
        shrink<Op, T>(dy, args_.dy_stride, block_.rows, c, n, static_cast<const Element*>(adapter_.b),
                      adapter_.b_stride, rank_, Dropout{}, 0, scratch_, sums_);
      }
      for (int64_t b = c; args_.db && b < c + n; b += kGradColumns) {
        const int64_t m = c + n - b < kGradColumns ? c + n - b : kGradColumns;
        int64_t stride = 0;
        const Unit* q = stage_block<Op, T>(dy + b, args_.dy_stride, block_.rows, m, nullptr, 0, nullptr, 0,
                                           memory, &stride);
        add_outer(q, stride, m, args_.db + b, args_.d_out);
      }
    }
  }

  // ds = keep_scale scaling dy B, in the compute type
  void finish_ds() {
    const float scale = adapter_.scaling * adapter_.dropout.keep_scale;
    for (int64_t i = 0; i < block_.rows; ++i) {
      Element* row = reinterpret_cast<Element*>(ds_ + i * units_);
      scale_row(sums_ + i * rank_, rank_, scale, row);
      if (rank_ % Op::kUnits) {
        from_float(0.0f, row + rank_);
      }
    }
  }

  // dA, and dx under the same mask
  void read_x() {
    if (args_.da) {
      stage_left(reinterpret_cast<const Element*>(ds_), units_ * Op::kUnits);
    }
    const RankOperand<Op> a(adapter_.a, adapter_.a_stride, args_.d_in);
    const T* x = static_cast<const T*>(args_.x) + block_.begin * args_.x_stride;
    T* dx = args_.dx ? static_cast<T*>(args_.dx) + block_.begin * args_.dx_stride : nullptr;
    Scratch scratch = scratch_;
    uint64_t* bits = scratch.take<uint64_t>(kBlockRows * kWords);
    Unit* memory = scratch.take<Unit>(kBlockRows * kGradColumns);
    const bool dropped = adapter_.dropout.threshold != 0;
    for (int64_t c = 0; c < args_.d_in; c += kGradColumns) {
      const int64_t n = args_.d_in - c < kGradColumns ? args_.d_in - c : kGradColumns;
      if (dropped) {
        keep_bits_block(adapter_.dropout, block_.philox_row, block_.rows, c / kWordColumns, words_of(n), bits,
                        kWords);
      }
      if (args_.da) {
        int64_t stride = 0;
        const Unit* q = stage_block<Op, T>(x + c, args_.x_stride, block_.rows, n, dropped ? bits : nullptr,
                                           kWords, dx ? dx + c : nullptr, args_.dx_stride, memory, &stride);
        add_outer(q, stride, n, args_.da + c, args_.d_in);
      }
      if (dx) {
        const BroadcastArgs<Op> expand{ds_, units_, 1, block_.rows, a.data + c, a.stride, units_, n};
        if (dropped) {
          broadcast_gemm<Op>(expand, typename Expand<Op, T>::Kept{{dx + c, args_.dx_stride}, bits, kWords});
        } else {
          broadcast_gemm<Op>(expand, typename Expand<Op, T>::Add{dx + c, args_.dx_stride});
        }
      }
    }
  }

 private:
  static constexpr int64_t kWords = kGradColumns / kWordColumns;

  // The left factor of a gradient, [rows, rank], as units along the rows.
  template <typename P>
  void stage_left(const P* rows, int64_t stride) {
    left_ = stage_columns<Op, P>(rows, stride, block_.rows, rank_, nullptr, 0, left_memory_, rank_,
                                 &left_stride_);
  }

  // sums[j][c] (+)= sum over the block's rows of left[i][j] * q[i][c]
  void add_outer(const Unit* q, int64_t q_stride, int64_t cols, float* sums, int64_t sums_stride) const {
    constexpr int64_t kSlice = Simd::kTileVecs * Simd::kLanes;
    for (int64_t c = 0; c < cols; c += kSlice) {
      const int64_t n = cols - c < kSlice ? cols - c : kSlice;
      const BroadcastArgs<Op> outer{
          left_, 1, left_stride_, rank_, q + c, q_stride, units_of(block_.rows, Op::kUnits), n};
      if (first_) {
        broadcast_gemm<Op>(outer, SetSums{{sums + c, sums_stride}});
      } else {
        broadcast_gemm<Op>(outer, AddToSums{{sums + c, sums_stride}});
      }
    }
  }

  const BackwardArgs& args_;
  const AdapterView& adapter_;
  const RowBlock& block_;
  bool first_;  // of its group: nothing is there to be added to
  int64_t rank_;
  int64_t units_;
  Scratch scratch_;
  float* sums_;
  Unit* ds_;
  Unit* left_memory_;
  const Unit* left_ = nullptr;
  int64_t left_stride_ = 0;
};

template <class Op, typename T>
void backward(const BackwardArgs& args) {
  int32_t index = args.first_block;
  for (int64_t i = 0; i < args.block_count; ++i, index = args.blocks[index].next) {
    BlockBackward<Op, T> block(args, args.blocks[index], i == 0);
    block.read_dy();
    if (args.dx || args.da) {
      block.finish_ds();
      block.read_x();
    }
  }
}

inline int64_t sums_size(int64_t rank, int64_t cols) { return rank * cols; }

// The sums of a gradient's groups, in their order.
inline void write_gradient(const GradientArgs& args) {
  constexpr int64_t kColumns = 256;
  float total[kColumns];
  for (int64_t j = 0; j < args.rank; ++j) {
    for (int64_t c = args.begin; c < args.end; c += kColumns) {
      const int64_t n = args.end - c < kColumns ? args.end - c : kColumns;
      const float* sums = args.sums + j * args.cols + c;
      std::memset(total, 0, sizeof(total));
      for (int64_t group = 0; group < args.groups; ++group) {
        for (int64_t k = 0; k < n; ++k) {
          total[k] += sums[group * args.next + k];
        }
      }
      if (args.add) {
        add_row(args.grad, j, c, n, total);
      }
      write_row(total, n, args.grad, j, c);
    }
  }
}

}  // namespace mlora::cpu::MLORA_ISA
