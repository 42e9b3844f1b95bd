// Products of shared-memory tiles in a warp's registers.
//
// A warp holds [16 kM, 8 kN] sums in the layout of mma.m16n8k16: lane l has rows l / 4 and l / 4 + 8, columns
// 2 (l % 4) and the next, of each 16 x 8 block. fp32 uses the same layout without matrix instructions.
#pragma once

#include "cuda/shared_tile.cuh"

namespace mlora::cuda {

__device__ inline int lane_index() { return thread_index() & 31; }
__device__ inline int warp_index() { return thread_index() >> 5; }
__device__ inline int fragment_row() { return lane_index() >> 2; }
__device__ inline int fragment_column() { return (lane_index() & 3) * 2; }

template <int kM, int kN>
struct Fragment {
  float value[kM][kN][4];

  __device__ void clear() { fill(0.0f); }
  __device__ void fill(float number) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          value[m][n][i] = number;
        }
      }
    }
  }

  __device__ void add(const Fragment& other) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          value[m][n][i] += other.value[m][n][i];
        }
      }
    }
  }

  // f(row, column, value) for each element of this lane.
  template <typename Function>
  __device__ void for_each(Function&& f) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          f(16 * m + fragment_row() + i / 2 * 8, 8 * n + fragment_column() + i % 2, value[m][n][i]);
        }
      }
    }
  }
};

// Along which side of a product the ranks run; blocks that hold none of them are left out.
enum class Ranks { kRows, kColumns, kDepth };

template <Ranks kWhere>
__device__ inline bool holds_ranks(Ranks side, int first, int ranks) {
  return side != kWhere || first < ranks;
}

// sum += a b over kDepth steps from step `depth`; a begins at row `m`, b at column `n` of the product.
// kAAlong, kBAlong: whether the operand's rows in shared memory run along the summed dimension.
template <Ranks kWhere, bool kAAlong, bool kBAlong, int kDepth, typename T, int kM, int kN, int kAColumns,
          int kBColumns>
__device__ inline void add_product(Fragment<kM, kN>& sum, SharedTile<T, kAColumns> a, int m,
                                   SharedTile<T, kBColumns> b, int n, int depth, int ranks) {
  const unsigned lane = static_cast<unsigned>(lane_index());
  const unsigned low = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
  // a single block of eight columns loads its one block twice
  const unsigned block = kN == 1 ? 0 : third;
  // Of the first matrices. In the others, rows further on lie at a fixed distance, since chunks change places
  // with a period of eight rows; and columns further on differ in bits of the address that are 0 here.
  const uint32_t a_first = shared_address(kAAlong ? a.element(m + low + second, depth + third)
                                                  : a.element(depth + low + third, m + second));
  const uint32_t b_first = shared_address(kBAlong ? b.element(n + low + block, depth + second)
                                                  : b.element(depth + low + second, n + block));
  constexpr uint32_t kSize = sizeof(T);
#pragma unroll(kM* kN > 8 ? 1 : 4)
  for (int k = 0; k < kDepth && holds_ranks<kWhere>(Ranks::kDepth, depth + k, ranks); k += 16) {
    const uint32_t along = static_cast<uint32_t>(k) * kSize;
    uint32_t a_words[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      if (holds_ranks<kWhere>(Ranks::kRows, m + 16 * i, ranks)) {
        const uint32_t across = 16 * i * kSize;
        load_matrices<!kAAlong>(a_words[i], kAAlong ? (a_first + across * kAColumns) ^ along
                                                    : (a_first + along * kAColumns) ^ across);
      }
    }
#pragma unroll
    for (int j = 0; j < kN; j += 2) {
      if (!holds_ranks<kWhere>(Ranks::kColumns, n + 8 * j, ranks)) {
        break;
      }
      uint32_t b_words[4];
      const uint32_t across = 8 * j * kSize;
      load_matrices<!kBAlong>(
          b_words, kBAlong ? (b_first + across * kBColumns) ^ along : (b_first + along * kBColumns) ^ across);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        if (holds_ranks<kWhere>(Ranks::kRows, m + 16 * i, ranks)) {
          multiply(T{}, sum.value[i][j], a_words[i], b_words[0], b_words[1]);
          if constexpr (kN > 1) {
            multiply(T{}, sum.value[i][j + 1], a_words[i], b_words[2], b_words[3]);
          }
        }
      }
    }
  }
}

template <bool kAlong, int kColumns>
__device__ inline void load_four(float (&out)[4], SharedTile<float, kColumns> tile, int index, int k) {
  if constexpr (kAlong) {
    const Chunk<float> four = *reinterpret_cast<const Chunk<float>*>(tile.chunk(index, k / 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = four.value[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = *tile.element(k + i, index);
    }
  }
}

// Sums of kDepth products are complete before they join: rounding errors grow with the number of joins.
template <Ranks kWhere, bool kAAlong, bool kBAlong, int kDepth, int kM, int kN, int kAColumns, int kBColumns>
__device__ inline void add_product(Fragment<kM, kN>& sum, SharedTile<float, kAColumns> a, int m,
                                   SharedTile<float, kBColumns> b, int n, int depth, int ranks) {
  Fragment<kM, kN> part;
  part.clear();
#pragma unroll 1
  for (int k = depth; k < depth + kDepth && holds_ranks<kWhere>(Ranks::kDepth, k, ranks); k += 4) {
    float a_values[2 * kM][4];
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      if (!holds_ranks<kWhere>(Ranks::kRows, m + 16 * (i / 2), ranks)) {
        break;
      }
      load_four<kAAlong>(a_values[i], a, m + 8 * i + fragment_row(), k);
    }
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (!holds_ranks<kWhere>(Ranks::kColumns, n + 8 * j, ranks)) {
        break;
      }
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float b_values[4];
        load_four<kBAlong>(b_values, b, n + 8 * j + fragment_column() + odd, k);
#pragma unroll
        for (int i = 0; i < 2 * kM; ++i) {
          if (!holds_ranks<kWhere>(Ranks::kRows, m + 16 * (i / 2), ranks)) {
            break;
          }
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            part.value[i / 2][j][i % 2 * 2 + odd] += a_values[i][step] * b_values[step];
          }
        }
      }
    }
  }
  sum.add(part);
}

}  // namespace mlora::cuda
