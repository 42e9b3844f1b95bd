// s F of one tile and block of columns: what the low-rank part adds to y, and to dx.
//
// Eight warps share the 64 x 64 numbers: 16 rows and 32 columns each.
//
// Letters: F [r, d] one adapter's factor, r its rank, R the largest rank.
#pragma once

#include "cuda/fragments.cuh"
#include "cuda/kernels.h"

namespace mlora::cuda {

constexpr int kDeltaBlocks = 4;
using Delta = Fragment<1, kDeltaBlocks>;

__device__ inline int delta_row() { return (warp_index() >> 1) * 16; }
__device__ inline int delta_column() { return (warp_index() & 1) * 8 * kDeltaBlocks; }

template <typename T, int kRanks>
__device__ inline void add_delta(Delta& sum, SharedTile<T, kRanks> s, SharedTile<T, kBlockColumns> factor,
                                 int ranks) {
  add_product<Ranks::kDepth, true, false, kRanks>(sum, s, delta_row(), factor, delta_column(), 0, ranks);
}

// sum += what is kept of part; `first`: sum is 0. keep[h]: the word of the warp's 32 columns, in this lane's
// row h.
__device__ inline void add_kept(Delta& sum, const Delta& part, const uint32_t (&keep)[2], bool first) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t own = keep[half] >> (fragment_column() / 2);
#pragma unroll
    for (int n = 0; n < kDeltaBlocks; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const bool kept = (own & (1u << (4 * n + 16 * odd))) != 0;
        const float value = kept ? part.value[0][n][2 * half + odd] : 0.0f;
        sum.value[0][n][2 * half + odd] = first ? value : sum.value[0][n][2 * half + odd] + value;
      }
    }
  }
}

// Lane t of four holds column t of a 4 x 4 matrix of words and gets its row t.
__device__ inline void transpose_words(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane_index() & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) == 0) {
        const uint32_t received = exchange(upper ? words[i] : words[i | bit], bit);
        words[i] = upper ? received : words[i];
        words[i | bit] = upper ? words[i | bit] : received;
      }
    }
  }
}

// Adds what `out` holds to the warp's part.
template <typename T>
__device__ inline void add_existing(Delta& sum, const T* out, int64_t stride, int rows, int columns) {
  sum.for_each([&](int row, int column, float& value) {
    row += delta_row();
    column += delta_column();
    if (row < rows && column < columns) {
      value += to_float(read(out + row * stride + column));
    }
  });
}

// Writes the warp's part of rows [0, rows) and columns [0, columns) from `out`, the block's first element.
template <bool kAligned, typename T>
__device__ inline void store_delta(Delta& sum, T* out, int64_t stride, int rows, int columns) {
  if constexpr (!kAligned) {
    sum.for_each([&](int row, int column, float value) {
      row += delta_row();
      column += delta_column();
      if (row < rows && column < columns) {
        T rounded;
        from_float(value, rounded);
        write(out + row * stride + column, rounded);
      }
    });
    return;
  }
  char* first = reinterpret_cast<char*>(out);
  const uint32_t row_bytes = static_cast<uint32_t>(stride) * static_cast<uint32_t>(sizeof(T));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = delta_row() + fragment_row() + 8 * half;
    char* own = first + static_cast<uint32_t>(row) * row_bytes;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int n = 0; n < kDeltaBlocks; ++n) {
        const int column = delta_column() + 8 * n + fragment_column();
        if (row < rows && column < columns) {
          struct alignas(8) Pair {
            float low, high;
          };
          write(reinterpret_cast<Pair*>(own + column * 4),
                Pair{sum.value[0][n][2 * half], sum.value[0][n][2 * half + 1]});
        }
      }
    } else {
      Bytes16 words;
#pragma unroll
      for (int n = 0; n < kDeltaBlocks; ++n) {
        words.word[n] = pack(T{}, sum.value[0][n][2 * half], sum.value[0][n][2 * half + 1]);
      }
      transpose_words(words.word);
      const int column = delta_column() + 8 * (lane_index() & 3);
      if (row < rows && column < columns) {
        write(reinterpret_cast<Bytes16*>(own + column * 2), words);
      }
    }
  }
}

}  // namespace mlora::cuda
