// Dropout of a tile of rows in shared memory: each thread clears what is dropped of the chunks that it loads.
#pragma once

#include "cuda/kernels.h"
#include "cuda/shared_tile.cuh"

namespace mlora::cuda {

// Where the masks of dropout come from.
enum class Masks { kNone, kDrawn, kStored };

// Where the keep bits of 32 columns, from `column` on, of a row lie; see `keep_bits` for their order. Words
// of more columns hold the bits of counter after counter: 4 bits of even columns each, and 16 higher of odd
// ones.
__device__ inline int64_t word_place(int64_t rows_total, int columns, int layer, int64_t row, int column) {
  const int words = ceil_div(columns, kWordColumns);
  return (int64_t{layer} * rows_total + row) * words + column / kWordColumns;
}

// Keep bits of the chunks that load_rows lets this thread fill.
template <typename T, int kRows, int kColumns>
struct KeepBits {
  using Own = OwnChunks<T, kColumns>;
  static constexpr int kChunk = Chunk<T>::kCount;
  static constexpr int kOwn = kRows / Own::kStep;
  static_assert(kOwn * Own::kStep == kRows && kOwn <= 4);

  // As `keep_bits` gives them, of row after row, each four bits further on.
  uint32_t bits = 0;

  __device__ static int counter() { return Own::chunk() * kChunk / kCounterColumns; }
  __device__ static int word() { return Own::chunk() * kChunk / kWordColumns; }

  // `column` is the tile's first column, a multiple of 8.
  __device__ void draw(const Dropout& dropout, uint32_t philox_row, int column) {
    if (dropout.threshold == 0) {
      bits = ~0u;
      return;
    }
    bits = 0;
    const uint32_t first = static_cast<uint32_t>(column / kCounterColumns + counter());
#pragma unroll 2
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t row = philox_row + static_cast<uint32_t>(Own::row(i));
      bits |= keep_bits(philox(dropout, row, first), dropout.threshold) << (4 * i);
    }
  }

  // From the whole words of the thread's own rows.
  __device__ void set(const uint32_t (&words)[kOwn]) {
    bits = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      bits |= (words[i] >> (counter() % 4 * 4) & 0x000f000fu) << (4 * i);
    }
  }

  // Clears what is dropped of `from` in `to`.
  __device__ void apply(SharedTile<T, kColumns> from, SharedTile<T, kColumns> to) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      Bytes16 values = *reinterpret_cast<const Bytes16*>(from.chunk(Own::row(i), Own::chunk()));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        values.word[w] &= word_mask(bits >> (4 * i), w);
      }
      *reinterpret_cast<Bytes16*>(to.chunk(Own::row(i), Own::chunk())) = values;
    }
  }

  // The word of 32 columns of the thread's i-th row; the lanes that share it all get it.
  __device__ uint32_t whole_word(int i) const {
    uint32_t whole = (bits >> (4 * i) & 0x000f000fu) << (counter() % 4 * 4);
#pragma unroll
    for (int bit = 1; bit < kWordColumns / kChunk; bit *= 2) {
      whole |= exchange(whole, bit);
    }
    return whole;
  }

 private:
  __device__ static uint32_t word_mask(uint32_t bits, int word) {
    if constexpr (sizeof(T) == 4) {
      const int column = Own::chunk() * kChunk % kCounterColumns + word;
      return 0u - (bits >> (column / 2 + column % 2 * 16) & 1u);
    } else {
      return pair_mask(bits << (15 - word));
    }
  }
};

}  // namespace mlora::cuda
