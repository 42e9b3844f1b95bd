// The kernels of one instruction set and dtype as a table. `Simd` comes first: they are written against it.
#pragma once

#include "cpu/adamw.h"
#include "cpu/backward.h"
#include "cpu/forward.h"

namespace mlora::cpu::MLORA_ISA {

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
                 .grad_b = grad_b<Op, T>,
                 .grad_a = grad_a<Op, T>,
                 .convert_rows = convert_rows<Op>,
                 .keep_bits = keep_bits,
                 .adamw = adamw<T>};
}

}  // namespace mlora::cpu::MLORA_ISA
