// Tiles in shared memory, and how they are filled.
#pragma once

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

  // Unsigned, since divisions are shifts then.
  __device__ T* chunk(unsigned row, unsigned chunk) const {
    const unsigned place = chunk ^ (row / (8 / kSpread) % kSpread);
    return data + row * kColumns + place * kChunk;
  }
  __device__ T* element(unsigned row, unsigned column) const {
    return chunk(row, column / kChunk) + column % kChunk;
  }
};

// The row-th row of a matrix.
template <typename T>
__device__ inline T* row_at(T* data, int64_t stride, int row) {
  return data + static_cast<uint64_t>(static_cast<uint32_t>(row)) * static_cast<uint64_t>(stride);
}

constexpr int larger(int a, int b) { return a > b ? a : b; }

__device__ inline int clamp(int value, int largest) {
  return value < 0 ? 0 : value < largest ? value : largest;
}

// The chunks of a tile that one thread fills: one column of chunks, every kStep-th row.
template <typename T, int kColumns>
struct OwnChunks {
  static constexpr int kStep = kThreads / SharedTile<T, kColumns>::kChunks;

  __device__ static int row(int i) {
    return i * kStep + static_cast<int>(static_cast<unsigned>(thread_index()) / kChunks);
  }
  __device__ static int chunk() { return static_cast<int>(static_cast<unsigned>(thread_index()) % kChunks); }

 private:
  static constexpr unsigned kChunks = SharedTile<T, kColumns>::kChunks;
};

// Products take ranks in blocks of 16: a tile is filled up to the end of the last block, and not beyond.
__device__ inline int whole_blocks(int ranks) { return (ranks + 15) / 16 * 16; }

// Fills the first `used_rows` rows of at most kRows, and the first `used_columns` of each, with rows [0,
// rows) and columns [0, columns) of `source` and zeros elsewhere. Complete after wait_copies and synchronize.
// kAligned: 16 bytes at a time; columns are filled up to whole chunks, which must be there.
template <int kRows, bool kAligned, typename T, int kColumns>
__device__ inline void load_rows(SharedTile<T, kColumns> tile, const T* source, int64_t stride, int rows,
                                 int columns, int used_rows = kRows, int used_columns = kColumns) {
  using Own = OwnChunks<T, kColumns>;
  constexpr int kChunk = Chunk<T>::kCount;
  const int chunk = Own::chunk();
  if (chunk * kChunk >= used_columns) {
    return;
  }
  if constexpr (kAligned) {
    const char* from = reinterpret_cast<const char*>(source + chunk * kChunk);
    const uint32_t row_bytes = static_cast<uint32_t>(stride) * static_cast<uint32_t>(sizeof(T));
    const int present_rows = chunk * kChunk < columns ? rows : 0;
#pragma unroll(kRows > 64 ? 2 : 4)
    for (int i = 0; i * Own::kStep < kRows; ++i) {
      const int row = Own::row(i);
      if (row < used_rows) {
        copy_async(tile.chunk(row, chunk), from + static_cast<uint32_t>(row) * row_bytes, row < present_rows);
      }
    }
    return;
  }
  const int count = clamp(columns - chunk * kChunk, kChunk);
  source += count > 0 ? chunk * kChunk : 0;
#pragma unroll 1
  for (int row = Own::row(0); row < used_rows; row += Own::kStep) {
    const T* from = source + (row < rows ? row * stride : 0);
    T* out = tile.chunk(row, chunk);
#pragma unroll 1
    for (int i = 0; i < kChunk; ++i) {
      out[i] = row < rows && i < count ? read(from + i) : T{};
    }
  }
}

}  // namespace mlora::cuda
