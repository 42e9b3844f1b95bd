// One block of rows forward: s = scaling drop(x) A^T, then y += s B^T.
#pragma once

#include "cpu/blocks.h"

namespace mlora::cpu::MLORA_ISA {

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
  for (int64_t c = 0; c < args.d_in; c += kDotElements<Op>) {
    const int64_t n = args.d_in - c < kDotElements<Op> ? args.d_in - c : kDotElements<Op>;
    shrink<Op, T>(static_cast<const T*>(args.x) + block.begin * args.x_stride, args.x_stride, block.rows, c,
                  n, static_cast<const Element*>(adapter.a), adapter.a_stride, rank, adapter.dropout,
                  block.philox_row, scratch, sums);
  }
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
  const RankOperand<Op> b(adapter.b, adapter.b_stride, args.d_out);
  T* y = static_cast<T*>(args.y) + block.begin * args.y_stride;
  for (int64_t c = 0; c < args.d_out; c += kExpandColumns<Op>) {
    const int64_t n = args.d_out - c < kExpandColumns<Op> ? args.d_out - c : kExpandColumns<Op>;
    broadcast_gemm<Op>({s_units, units, 1, block.rows, b.data + c, b.stride, units, n},
                       typename Expand<Op, T>::Add{y + c, args.y_stride});
  }
}

}  // namespace mlora::cpu::MLORA_ISA
