// The two register tiles that every kernel is made of. One 32-bit lane holds Op::kUnits elements along the
// sum.
#pragma once

#include "cpu/prefetch.h"
#include "params.h"

namespace mlora::cpu::MLORA_ISA {

struct F32Fma {
  using Element = float;
  using Unit = float;
  static constexpr int kUnits = 1;
  static Simd::Vec fma(Simd::Vec a, Simd::Vec b, Simd::Vec c) { return Simd::fma(a, b, c); }
  static Simd::Vec load(const float* p) { return Simd::load(p); }
  static Simd::Vec load(const float* p, int64_t n) { return Simd::load(p, n); }
  static Simd::Vec broadcast(const float* p) { return Simd::set1(*p); }
  static Simd::Vec load_units(const float* p) { return Simd::load(p); }
  static Simd::Vec load_units(const float* p, int64_t n) { return Simd::load(p, n); }
};

// out[i][j] (+)= sum over k of x[i][k] * a[j][k], i < M, j < N <= 4: lanes run along the sum.
template <class Op, int M, int N>
void dot_tile(const typename Op::Element* x, int64_t x_stride, const typename Op::Element* a,
              int64_t a_stride, int64_t k, float* out, int64_t out_stride, bool add) {
  constexpr int64_t kStep = Simd::kLanes * Op::kUnits;
  Simd::Vec acc[M][4];
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < 4; ++j) {
      acc[i][j] = Simd::zero();
    }
  }
  int64_t c = 0;
  for (; c + kStep <= k; c += kStep) {
    Simd::Vec av[N];
    for (int j = 0; j < N; ++j) {
      av[j] = Op::load(a + j * a_stride + c);
    }
    for (int i = 0; i < M; ++i) {
      const Simd::Vec xv = Op::load(x + i * x_stride + c);
      for (int j = 0; j < N; ++j) {
        acc[i][j] = Op::fma(xv, av[j], acc[i][j]);
      }
    }
  }
  if (c < k) {
    for (int i = 0; i < M; ++i) {
      const Simd::Vec xv = Op::load(x + i * x_stride + c, k - c);
      for (int j = 0; j < N; ++j) {
        acc[i][j] = Op::fma(xv, Op::load(a + j * a_stride + c, k - c), acc[i][j]);
      }
    }
  }
  for (int i = 0; i < M; ++i) {
    float sums[4];
    Simd::sum4(acc[i], sums);
    for (int j = 0; j < N; ++j) {
      float* target = out + i * out_stride + j;
      *target = add ? *target + sums[j] : sums[j];
    }
  }
}

template <class Op, int M>
void dot_panel(const typename Op::Element* x, int64_t x_stride, const typename Op::Element* a,
               int64_t a_stride, int64_t rank, int64_t k, float* out, int64_t out_stride, bool add) {
  int64_t j = 0;
  for (; j + 4 <= rank; j += 4) {
    dot_tile<Op, M, 4>(x, x_stride, a + j * a_stride, a_stride, k, out + j, out_stride, add);
  }
  const auto* rest = a + j * a_stride;
  switch (rank - j) {
    case 3:
      return dot_tile<Op, M, 3>(x, x_stride, rest, a_stride, k, out + j, out_stride, add);
    case 2:
      return dot_tile<Op, M, 2>(x, x_stride, rest, a_stride, k, out + j, out_stride, add);
    case 1:
      return dot_tile<Op, M, 1>(x, x_stride, rest, a_stride, k, out + j, out_stride, add);
    default:
      return;
  }
}

// rows <= Simd::kDotRows
template <class Op>
void dot_rows(const typename Op::Element* x, int64_t x_stride, int64_t rows, const typename Op::Element* a,
              int64_t a_stride, int64_t rank, int64_t k, float* out, int64_t out_stride, bool add) {
  static_assert(Simd::kDotRows <= 6);
  switch (rows) {
    case 6:
      return dot_panel<Op, 6>(x, x_stride, a, a_stride, rank, k, out, out_stride, add);
    case 5:
      return dot_panel<Op, 5>(x, x_stride, a, a_stride, rank, k, out, out_stride, add);
    case 4:
      return dot_panel<Op, 4>(x, x_stride, a, a_stride, rank, k, out, out_stride, add);
    case 3:
      return dot_panel<Op, 3>(x, x_stride, a, a_stride, rank, k, out, out_stride, add);
    case 2:
      return dot_panel<Op, 2>(x, x_stride, a, a_stride, rank, k, out, out_stride, add);
    default:
      return dot_panel<Op, 1>(x, x_stride, a, a_stride, rank, k, out, out_stride, add);
  }
}

// Operands of sum over k of p[m][k] * q[k][c]: p is broadcast, lanes run along c.
template <class Op>
struct BroadcastArgs {
  const typename Op::Unit* p;
  int64_t p_row;
  int64_t p_k;
  int64_t rows;
  const typename Op::Unit* q;
  int64_t q_stride;
  int64_t k;
  int64_t cols;
};

template <class Op, int M, int V, bool kTail, class Epilogue>
void broadcast_tile(const BroadcastArgs<Op>& args, int64_t row, int64_t col, const Epilogue& epilogue) {
  constexpr int kVecs = Epilogue::kVecs;
  const int64_t n = args.cols - col;  // only looked at in the tail
  Simd::Vec acc[M][V];
  for (int i = 0; i < M; ++i) {
    for (int v = 0; v < V; v += kVecs) {
      kTail ? epilogue.begin(row + i, col, acc[i], n)
            : epilogue.begin(row + i, col + v * Simd::kLanes, acc[i] + v);
    }
  }
  if constexpr (!kTail) {
    for (int i = 0; i < M; ++i) {
      epilogue.prefetch(row + i, col + V * Simd::kLanes, V * Simd::kLanes);
    }
  }
  const auto* p = args.p + row * args.p_row;
  const auto* q = args.q + col;
  for (int64_t k = 0; k < args.k; ++k) {
    Simd::Vec qv[V];
    for (int v = 0; v < V; ++v) {
      qv[v] = kTail && kVecs == 1 ? Op::load_units(q, n) : Op::load_units(q + v * Simd::kLanes);
    }
    for (int i = 0; i < M; ++i) {
      const Simd::Vec pv = Op::broadcast(p + i * args.p_row);
      for (int v = 0; v < V; ++v) {
        acc[i][v] = Op::fma(pv, qv[v], acc[i][v]);
      }
    }
    p += args.p_k;
    q += args.q_stride;
  }
  for (int i = 0; i < M; ++i) {
    for (int v = 0; v < V; v += kVecs) {
      kTail ? epilogue.end(row + i, col, acc[i], n)
            : epilogue.end(row + i, col + v * Simd::kLanes, acc[i] + v);
    }
  }
}

template <class Op, int M, class Epilogue>
void broadcast_panel(const BroadcastArgs<Op>& args, int64_t row, const Epilogue& epilogue) {
  constexpr int64_t kWide = Simd::kTileVecs * Simd::kLanes;
  constexpr int kVecs = Epilogue::kVecs;
  int64_t col = 0;
  for (; col + kWide <= args.cols; col += kWide) {
    broadcast_tile<Op, M, Simd::kTileVecs, false>(args, row, col, epilogue);
  }
  for (; col + kVecs * Simd::kLanes <= args.cols; col += kVecs * Simd::kLanes) {
    broadcast_tile<Op, M, kVecs, false>(args, row, col, epilogue);
  }
  if (col < args.cols) {
    broadcast_tile<Op, M, kVecs, true>(args, row, col, epilogue);
  }
}

template <class Op, class Epilogue>
void broadcast_gemm(const BroadcastArgs<Op>& args, const Epilogue& epilogue) {
  static_assert(Simd::kTileRows <= 6);
  const int64_t tiles = (args.rows + Simd::kTileRows - 1) / Simd::kTileRows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t row = args.rows * tile / tiles;
    switch (args.rows * (tile + 1) / tiles - row) {
      case 6:
        broadcast_panel<Op, 6>(args, row, epilogue);
        break;
      case 5:
        broadcast_panel<Op, 5>(args, row, epilogue);
        break;
      case 4:
        broadcast_panel<Op, 4>(args, row, epilogue);
        break;
      case 3:
        broadcast_panel<Op, 3>(args, row, epilogue);
        break;
      case 2:
        broadcast_panel<Op, 2>(args, row, epilogue);
        break;
      default:
        broadcast_panel<Op, 1>(args, row, epilogue);
        break;
    }
  }
}

// What a tile does with kVecs vectors of `rows[row]` from column `col`: `begin` gives the accumulators' first
// values, `end` takes their last. The versions with `n` are for fewer columns than that.

// rows += sum, in the dtype of the rows. The sum is complete before it is added: in fp32, a sum that began
// with what is there would round at its size with every product.
template <typename T>
struct AddTo {
  static constexpr int kVecs = 1;
  T* rows;
  int64_t stride;
  T* at(int64_t row, int64_t col) const { return rows + row * stride + col; }
  void prefetch(int64_t row, int64_t col, int64_t cols) const { prefetch_row(at(row, col), cols); }
  void begin(int64_t, int64_t, Simd::Vec* acc) const { *acc = Simd::zero(); }
  void begin(int64_t, int64_t, Simd::Vec* acc, int64_t) const { *acc = Simd::zero(); }
  Simd::Vec total(int64_t row, int64_t col, Simd::Vec sum) const {
    return Simd::add(Simd::load(at(row, col)), sum);
  }
  Simd::Vec total(int64_t row, int64_t col, Simd::Vec sum, int64_t n) const {
    return Simd::add(Simd::load(at(row, col), n), sum);
  }
  void end(int64_t row, int64_t col, const Simd::Vec* sum) const {
    Simd::store(at(row, col), total(row, col, *sum));
  }
  void end(int64_t row, int64_t col, const Simd::Vec* sum, int64_t n) const {
    Simd::store(at(row, col), total(row, col, *sum, n), n);
  }
};

// The same where the keep bit is set, and nothing elsewhere; columns count from the first of the bits.
template <typename T>
struct AddKept : AddTo<T> {
  const uint64_t* bits;
  int64_t bits_stride;
  uint64_t kept(int64_t row, int64_t col) const { return bits[row * bits_stride + (col >> 6)] >> (col & 63); }
  void end(int64_t row, int64_t col, const Simd::Vec* sum) const {
    Simd::store_kept(this->at(row, col), this->total(row, col, *sum), kept(row, col));
  }
  void end(int64_t row, int64_t col, const Simd::Vec* sum, int64_t n) const {
    Simd::store_kept(this->at(row, col), this->total(row, col, *sum, n), kept(row, col), n);
  }
};

// The same for sums that stay in the cache.
struct AddToSums : AddTo<float> {
  void prefetch(int64_t, int64_t, int64_t) const {}
};

// The first sums of all: nothing is there to be added to.
struct SetSums : AddToSums {
  void end(int64_t row, int64_t col, const Simd::Vec* sum) const { Simd::store(at(row, col), *sum); }
  void end(int64_t row, int64_t col, const Simd::Vec* sum, int64_t n) const {
    Simd::store(at(row, col), *sum, n);
  }
};

// What the low-rank part is added with, and the order of columns that its operand is staged in.
template <class Op, typename T>
struct Expand {
  using Add = AddTo<T>;
  using Kept = AddKept<T>;
};

#ifdef __AVX512BF16__
template <>
struct Expand<BF16Dot, BF16> {
  using Add = AddPairsTo;
  using Kept = AddPairsKept;
};
#endif

}  // namespace mlora::cpu::MLORA_ISA
