// Tiles in shared memory, and how they are filled.
#pragma once

#include "cuda/factor.h"
#include "cuda/kernels.h"
#include "cuda/philox.h"
#include "cuda/primitives.cuh"

namespace mlora::cuda {

constexpr int kThreads = 256;

// Rows of kColumns numbers, in chunks of 16 bytes. Chunks change places within a row, so that one column of
// chunks in eight rows lies in different banks.
template <typename T, int kColumns_>
struct SharedTile {
  static constexpr int kColumns = kColumns_;
  static constexpr int kChunk = Chunk<T>::kCount;
  static constexpr int kChunks = kColumns / kChunk;
  static constexpr int kSpread = kChunks < 8 ? kChunks : 8;

  T* data;

  static constexpr int bytes(int rows) { return rows * kColumns * static_cast<int>(sizeof(T)); }

  __device__ T* chunk(int row, int chunk) const {
    const int place = chunk ^ ((row / (8 / kSpread)) % kSpread);
    return data + row * kColumns + place * kChunk;
  }
  __device__ T* element(int row, int column) const { return chunk(row, column / kChunk) + column % kChunk; }
};

__device__ inline int clamp(int value, int largest) {
  return value < 0 ? 0 : value < largest ? value : largest;
}

// The chunks of a tile that one thread fills: one column of chunks, every kStep-th row.
template <typename T, int kColumns>
struct OwnChunks {
  static constexpr int kStep = kThreads / SharedTile<T, kColumns>::kChunks;

  __device__ static int row(int i) { return i * kStep + thread_index() / SharedTile<T, kColumns>::kChunks; }
  __device__ static int chunk() { return thread_index() % SharedTile<T, kColumns>::kChunks; }
};

// Products take ranks in blocks of 16: a tile is filled up to the end of the last block, and not beyond.
__device__ inline int whole_blocks(int ranks) { return (ranks + 15) / 16 * 16; }

// Fills the first `used_rows` rows of at most kRows, and the first `used_columns` of each, with rows [0,
// rows) and columns [0, columns) of `source` and zeros elsewhere. Complete after wait_copies and synchronize.
template <int kRows, typename T, int kColumns>
__device__ inline void load_rows(SharedTile<T, kColumns> tile, const T* source, int64_t stride, int rows,
                                 int columns, bool aligned, int used_rows = kRows,
                                 int used_columns = kColumns) {
  using Own = OwnChunks<T, kColumns>;
  constexpr int kChunk = Chunk<T>::kCount;
  const int chunk = Own::chunk();
  const int count = clamp(columns - chunk * kChunk, kChunk);
  if (chunk * kChunk >= used_columns) {
    return;
  }
  source += count > 0 ? chunk * kChunk : 0;
  if (aligned) {
#pragma unroll
    for (int i = 0; i * Own::kStep < kRows; ++i) {
      const int row = Own::row(i);
      if (row < used_rows) {
        const bool present = row < rows;
        copy_async(tile.chunk(row, chunk), source + (present ? row * stride : 0),
                   present ? count * static_cast<int>(sizeof(T)) : 0);
      }
    }
    return;
  }
#pragma unroll 1
  for (int row = Own::row(0); row < used_rows; row += Own::kStep) {
    const T* from = source + (row < rows ? row * stride : 0);
    Chunk<T> values;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      values.value[i] = row < rows && i < count ? from[i] : T{};
    }
    *reinterpret_cast<Chunk<T>*>(tile.chunk(row, chunk)) = values;
  }
}

// One panel of one adapter's factor: ranks [0, ranks) from `base`.
template <typename T>
struct Panel {
  const void* base;
  int64_t rank_stride;
  int64_t column_stride;
  int ranks;
  bool convert;  // fp32 beside 16-bit rows
  bool aligned;

  __device__ Panel(const FactorTable& table, const FactorRow& row, int panel, int width)
      : rank_stride(row.rank_stride),
        column_stride(row.column_stride),
        ranks(panel_ranks(row.rank, panel, width)),
        convert(sizeof(T) != 4 && table.type == Scalar::kFloat) {
    const int size = convert ? 4 : static_cast<int>(sizeof(T));
    const int64_t offset = row.offset + int64_t{panel} * width * rank_stride;
    base = static_cast<const char*>(table.base) + offset * size;
    aligned =
        column_stride == 1 && rank_stride * size % 16 == 0 && reinterpret_cast<uintptr_t>(base) % 16 == 0;
  }
};

// One chunk of fp32 numbers as T.
template <typename T>
__device__ inline Chunk<T> convert_chunk(const float* from, int64_t stride, int count, bool aligned) {
  Chunk<T> values;
  if (aligned && count == Chunk<T>::kCount) {
#pragma unroll
    for (int i = 0; i < Chunk<T>::kCount; i += 4) {
      const Chunk<float> four = *reinterpret_cast<const Chunk<float>*>(from + i);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        from_float(four.value[k], values.value[(i + k) % Chunk<T>::kCount]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < Chunk<T>::kCount; ++i) {
      from_float(i < count ? from[i * stride] : 0.0f, values.value[i]);
    }
  }
  return values;
}

// Fills the rows of whole blocks of ranks with columns [column, column + columns) of a panel and zeros
// elsewhere.
template <int kRanks, typename T, int kColumns>
__device__ inline void load_factor(SharedTile<T, kColumns> tile, const Panel<T>& panel, int column,
                                   int columns) {
  using Shape = SharedTile<T, kColumns>;
  const int used = whole_blocks(panel.ranks);
  const T* same = static_cast<const T*>(panel.base) + column * panel.column_stride;
  if (!panel.convert && panel.aligned) {
    load_rows<kRanks>(tile, same, panel.rank_stride, panel.ranks, columns, true, used);
    return;
  }
  const float* other = static_cast<const float*>(panel.base) + column * panel.column_stride;
  const int chunk = OwnChunks<T, kColumns>::chunk();
  const int count = clamp(columns - chunk * Shape::kChunk, Shape::kChunk);
#pragma unroll 1
  for (int rank = OwnChunks<T, kColumns>::row(0); rank < used; rank += OwnChunks<T, kColumns>::kStep) {
    const int here = rank < panel.ranks ? count : 0;
    const int64_t start =
        here > 0 ? rank * panel.rank_stride + chunk * Shape::kChunk * panel.column_stride : 0;
    Chunk<T> values;
    if (panel.convert) {
      values = convert_chunk<T>(other + start, panel.column_stride, here, panel.aligned);
    } else {
#pragma unroll
      for (int i = 0; i < Shape::kChunk; ++i) {
        values.value[i] = i < here ? same[start + i * panel.column_stride] : T{};
      }
    }
    *reinterpret_cast<Chunk<T>*>(tile.chunk(rank, chunk)) = values;
  }
}

}  // namespace mlora::cuda
