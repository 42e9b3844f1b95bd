// Tiles of an adapter's factor in shared memory.
//
// Letters: F [r, d] one adapter's factor, r its rank, R the largest rank.
#pragma once

#include "cuda/kernels.h"
#include "cuda/shared_tile.cuh"

namespace mlora::cuda {

// One panel of one adapter's factor: at most `width` ranks from `first` on, which lie at `base`.
template <typename T>
struct Panel {
  const void* base;
  int64_t rank_stride;
  int64_t column_stride;
  int ranks;
  bool convert;  // fp32 beside 16-bit rows

  __device__ Panel(const FactorTable& table, const FactorRow& row, int first, int width)
      : rank_stride(row.rank_stride),
        column_stride(row.column_stride),
        ranks(panel_ranks(row.rank, first, width)),
        convert(sizeof(T) != 4 && table.type == Scalar::kFloat) {
    const int size = convert ? 4 : static_cast<int>(sizeof(T));
    const int64_t offset = row.offset + first * rank_stride;
    base = static_cast<const char*>(table.base) + offset * size;
  }
};

// Fills the rows of whole blocks of ranks with columns [column, column + columns) of a panel and zeros
// elsewhere; complete as load_rows is, and after `end`. With kDefer fp32 numbers wait in registers between
// `begin` and `end`, where they become T.
template <typename T, int kRanks, int kColumns, bool kDefer, bool kAligned>
class FactorLoad {
 public:
  using Tile = SharedTile<T, kColumns>;

  __device__ void begin(Tile tile, const Panel<T>& panel, int column, int columns) {
    deferred_ = kDefer && kAligned && panel.convert;
    if (kAligned && panel.convert) {
      load_floats(tile, panel, column, columns);
    } else if (kAligned) {
      load_rows<kRanks, true>(tile, static_cast<const T*>(panel.base) + column, panel.rank_stride,
                              panel.ranks, columns, whole_blocks(panel.ranks));
    } else {
      load_numbers(tile, panel, column, columns);
    }
  }

  __device__ void end(Tile tile, const Panel<T>& panel) const {
    if constexpr (kDefer) {
      if (deferred_) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          store(tile, panel, Own::row(i), waiting_[i]);
        }
      }
    }
  }

 private:
  using Own = OwnChunks<T, kColumns>;
  static constexpr int kChunk = Chunk<T>::kCount;
  static constexpr int kOwn = kRanks > Own::kStep ? kRanks / Own::kStep : 1;

  struct Floats {
    Chunk<float> four[kChunk / 4];
  };

  __device__ void load_floats(Tile tile, const Panel<T>& panel, int column, int columns) {
    const int first = Own::chunk() * kChunk;
    const float* source = static_cast<const float*>(panel.base) + column + first;
    const auto load = [&](int row) {
      const bool present = first < columns && row < panel.ranks;
      const Chunk<float>* from = reinterpret_cast<const Chunk<float>*>(source + row * panel.rank_stride);
      Floats floats;
#pragma unroll
      for (int k = 0; k < kChunk / 4; ++k) {
        floats.four[k] = present ? read(from + k) : Chunk<float>{};
      }
      return floats;
    };
    if constexpr (kDefer) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        waiting_[i] = load(Own::row(i));
      }
    } else {
#pragma unroll(kRanks > 64 ? 1 : 2)
      for (int i = 0; i < kOwn; ++i) {
        store(tile, panel, Own::row(i), load(Own::row(i)));
      }
    }
  }

  __device__ static void store(Tile tile, const Panel<T>& panel, int row, const Floats& floats) {
    if (row < whole_blocks(panel.ranks)) {
      Chunk<T> values;
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        from_float(floats.four[k / 4].value[k % 4], values.value[k]);
      }
      *reinterpret_cast<Chunk<T>*>(tile.chunk(row, Own::chunk())) = values;
    }
  }

  // Any strides and widths, one number at a time.
  __device__ void load_numbers(Tile tile, const Panel<T>& panel, int column, int columns) const {
    const int count = clamp(columns - Own::chunk() * kChunk, kChunk);
    const int64_t first = (column + Own::chunk() * kChunk) * panel.column_stride;
#pragma unroll 1
    for (int rank = Own::row(0); rank < whole_blocks(panel.ranks); rank += Own::kStep) {
      T* out = tile.chunk(rank, Own::chunk());
#pragma unroll 2
      for (int k = 0; k < kChunk; ++k) {
        const bool present = rank < panel.ranks && k < count;
        out[k] = present ? number(panel, first + rank * panel.rank_stride + k * panel.column_stride) : T{};
      }
    }
  }

  __device__ static T number(const Panel<T>& panel, int64_t place) {
    T value = {};
    if (panel.convert) {
      from_float(read(static_cast<const float*>(panel.base) + place), value);
    } else {
      value = read(static_cast<const T*>(panel.base) + place);
    }
    return value;
  }

  bool deferred_ = false;
  Floats waiting_[kDefer ? kOwn : 1];
};

}  // namespace mlora::cuda
