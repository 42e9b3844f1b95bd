// The kernels of one instruction set and dtype as a table. `Simd` comes first: they are written against it.
#pragma once

#include "cpu/adamw.h"
#include "cpu/backward.h"
#include "cpu/forward.h"

namespace mlora::cpu::MLORA_ISA {

// Pairs of rows are packed where a product sums along the rank; everything else is read as dense rows.
template <class Op>
int64_t packed_bytes(Along along, int64_t rank, int64_t cols) {
  return Op::kUnits == 1 || along == Along::kColumns ? 0
                                                     : units_of(rank, Op::kUnits) * padded_columns(cols) * 4;
}

template <class Op>
void pack(const PackArgs& args) {
  using Element = typename Op::Element;
  const int64_t n = args.end - args.begin;
  if (!packed_bytes<Op>(args.along, args.rank, args.cols)) {
    for (int64_t j = 0; j < args.rank; ++j) {
      convert_row(args.source, j, args.begin, n,
                  static_cast<Element*>(args.target) + j * args.cols + args.begin);
    }
    return;
  }
  if constexpr (Op::kUnits == 2) {
    constexpr int64_t kColumns = 512;
    Element pair[2][kColumns];
    for (int64_t j = 0; j < args.rank; j += 2) {
      for (int64_t c = args.begin; c < args.end; c += kColumns) {
        const int64_t m = args.end - c < kColumns ? args.end - c : kColumns;
        const bool paired = j + 1 < args.rank;
        convert_row(args.source, j, c, m, pair[0]);
        if (paired) {
          convert_row(args.source, j + 1, c, m, pair[1]);
        }
        split_units(pair[0], paired ? pair[1] : nullptr, m,
                    static_cast<uint32_t*>(args.target) + j / 2 * padded_columns(args.cols) + c);
      }
    }
  }
}

template <class Op, typename T>
constexpr Kernels make_kernels() {
  return Kernels{.compute = Op::kUnits == 1 ? Scalar::kFloat : Scalar::kBFloat16,
                 .scratch_bytes = scratch_bytes<Op>,
                 .packed_bytes = packed_bytes<Op>,
                 .pack = pack<Op>,
                 .forward = forward<Op, T>,
                 .sums_size = sums_size,
                 .backward = backward<Op, T>,
                 .write_gradient = write_gradient,
                 .keep_bits = keep_bits,
                 .adamw = adamw<T>,
                 .squares = squares<T>};
}

}  // namespace mlora::cpu::MLORA_ISA
