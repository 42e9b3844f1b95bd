// Dropout of a tile of rows in shared memory: each thread clears what is dropped of the chunks that it loads.
#pragma once

#include "cuda/philox.h"
#include "cuda/shared_tile.cuh"

namespace mlora::cuda {

// Keep bytes of the chunks that load_rows lets this thread fill.
template <typename T, int kRows, int kColumns>
struct KeepBits {
  using Own = OwnChunks<T, kColumns>;
  static constexpr int kChunk = Chunk<T>::kCount;
  static constexpr int kOwn = kRows / Own::kStep;
  static_assert(kOwn * Own::kStep == kRows && kOwn <= 4);

  uint32_t bytes = 0;  // one of each chunk

  // `column` is the tile's first column, a multiple of 8.
  __device__ void draw(const Dropout& dropout, uint32_t philox_row, int column) {
    const uint32_t counter = static_cast<uint32_t>((column + Own::chunk() * kChunk) / kCounterColumns);
    bytes = 0;
#pragma unroll 1
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t row = philox_row + static_cast<uint32_t>(Own::row(i));
      bytes |= keep_byte(philox(dropout, row, counter), dropout.threshold) << (8 * i);
    }
  }

  __device__ void apply(SharedTile<T, kColumns> tile) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      Bytes16* place = reinterpret_cast<Bytes16*>(tile.chunk(Own::row(i), Own::chunk()));
      Bytes16 values = *place;
      const uint32_t keep = bytes >> (8 * i) >> (sizeof(T) == 4 ? Own::chunk() % 2 * 4 : 0);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        values.word[w] &= word_mask(keep, w);
      }
      *place = values;
    }
  }

  // One byte for eight columns of a row.
  __device__ void store(uint8_t* out) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (Own::chunk() * kChunk % kCounterColumns == 0) {
        out[(Own::row(i) * kColumns + Own::chunk() * kChunk) / kCounterColumns] =
            static_cast<uint8_t>(bytes >> (8 * i));
      }
    }
  }

 private:
  __device__ static uint32_t word_mask(uint32_t keep, int word) {
    if constexpr (sizeof(T) == 4) {
      return (keep >> word & 1u) != 0 ? 0xffffffffu : 0u;
    } else {
      return ((keep >> (2 * word) & 1u) != 0 ? 0x0000ffffu : 0u) |
             ((keep >> (2 * word) & 2u) != 0 ? 0xffff0000u : 0u);
    }
  }
};

}  // namespace mlora::cuda
