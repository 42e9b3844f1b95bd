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

// Shared memory in which warps turn their parts of 16-bit results into whole rows: 16 rows of 64 bytes each,
// and 16 more, so that eight rows lie in different banks.
constexpr int kTurnRow = 80;
constexpr int kTurnBytes = kThreads / 32 * 16 * kTurnRow;

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
// kAligned: `turn` is kTurnBytes of shared memory, unless T is fp32.
template <bool kAligned, typename T>
__device__ inline void store_delta(Delta& sum, T* out, int64_t stride, int rows, int columns,
                                   unsigned char* turn) {
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
  const auto row_of_out = [&](int row) {
    return first + static_cast<uint32_t>(delta_row() + row) * row_bytes;
  };
  if constexpr (sizeof(T) == 4) {
    struct alignas(8) Pair {
      float low, high;
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_row() + 8 * half;
#pragma unroll
      for (int n = 0; n < kDeltaBlocks; ++n) {
        const int column = delta_column() + 8 * n + fragment_column();
        if (delta_row() + row < rows && column < columns) {
          write(reinterpret_cast<Pair*>(row_of_out(row) + column * 4),
                Pair{sum.value[0][n][2 * half], sum.value[0][n][2 * half + 1]});
        }
      }
    }
  } else {
    unsigned char* own = turn + warp_index() * 16 * kTurnRow;
    synchronize_warp();  // the rows before have been read
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kDeltaBlocks; ++n) {
        *reinterpret_cast<uint32_t*>(own + (fragment_row() + 8 * half) * kTurnRow + 16 * n +
                                     2 * fragment_column()) =
            pack(T{}, sum.value[0][n][2 * half], sum.value[0][n][2 * half + 1]);
      }
    }
    synchronize_warp();
    const int column = delta_column() + 8 * (lane_index() & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_row() + 8 * half;
      const Bytes16 eight = *reinterpret_cast<const Bytes16*>(own + row * kTurnRow + 16 * (lane_index() & 3));
      if (delta_row() + row < rows && column < columns) {
        write(reinterpret_cast<Bytes16*>(row_of_out(row) + column * 2), eight);
      }
    }
  }
}

}  // namespace mlora::cuda
