// dF [r, d] = s^T rows of one split, layer, block of columns and panel of ranks; with kDx s^T drop(rows), and
// dx = drop'(s F) of the same rows and columns under the same masks, which later layers add to.
//
// Letters: F [r, d] one adapter's factor, r its rank, R the largest rank.
#pragma once

#include "cuda/delta.cuh"
#include "cuda/dropout_tile.cuh"
#include "cuda/factor_tile.cuh"

namespace mlora::cuda {

template <typename T, int kRanks, bool kDx>
struct GradientShape {
  static constexpr int kStages = kRanks * static_cast<int>(sizeof(T)) >= 256 ? 2 : 3;
  static constexpr int kWarpsM = kRanks >= 128 ? 4 : kRanks >= 32 ? 2 : 1;
  static constexpr int kWarpsN = kThreads / 32 / kWarpsM;
  static constexpr int kM = kRanks / 16 / kWarpsM;
  static constexpr int kN = kBlockColumns / 8 / kWarpsN;
  static constexpr int kRowBytes = SharedTile<T, kBlockColumns>::bytes(kTileRows);
  static constexpr int kSBytes = SharedTile<T, kRanks>::bytes(kTileRows);
  static constexpr int kKeepBytes = kDx ? kTileRows * kBlockColumns / kCounterColumns : 0;
  static constexpr int kStageBytes = kRowBytes + kSBytes + kKeepBytes;
  static constexpr int kTileBytes = kSplitTiles * static_cast<int>(sizeof(Tile));
  static constexpr int kFactorBytes = kDx ? SharedTile<T, kBlockColumns>::bytes(kRanks) : 0;
  static constexpr int kShared = kTileBytes + kFactorBytes + kStages * kStageBytes;
};

// Where the sums of one program go.
template <typename T>
__device__ inline void write_gradient(const GradientArguments& arguments, const Split& split, int layer,
                                      int rank, int column, float value) {
  if (split.slot >= 0) {
    const int64_t row = (int64_t{layer} * arguments.slots + split.slot) * arguments.ranks + rank;
    arguments.partial[row * arguments.columns + column] = value;
    return;
  }
  const FactorRow& factor = row_of(arguments.factor, layer, split.adapter);
  const int64_t place =
      factor.grad_offset + rank * factor.grad_rank_stride + column * factor.grad_column_stride;
  if (sizeof(T) != 4 && arguments.factor.type == Scalar::kFloat) {
    float& out = static_cast<float*>(arguments.gradient)[place];
    out = arguments.add ? out + value : value;
  } else {
    T& out = static_cast<T*>(arguments.gradient)[place];
    from_float(arguments.add ? to_float(out) + value : value, out);
  }
}

// dx of rows without adapter.
template <typename T>
__device__ inline void clear_dx(const GradientArguments& arguments, const Split& split, int first_column,
                                int columns) {
  for (int i = split.tile_begin; i < split.tile_end; ++i) {
    const Tile tile = arguments.tiles[i];
    T* out = static_cast<T*>(arguments.dx.data) + tile.row * arguments.dx.stride + first_column;
    Delta zero;
    zero.clear();
    store_delta(zero, out, arguments.dx.stride, tile.rows, columns, arguments.dx.aligned);
  }
}

template <typename T, int kRanks, bool kDx>
__device__ inline void gradient_program(const GradientArguments& arguments, int split_index, int layer,
                                        int block, int panel_index) {
  using Shape = GradientShape<T, kRanks, kDx>;
  using Block = SharedTile<T, kBlockColumns>;
  const Split split = arguments.splits[split_index];
  const int first_column = block * kBlockColumns;
  const int columns = clamp(arguments.columns - first_column, kBlockColumns);
  const bool need_dx = kDx && arguments.dx.data != nullptr;
  if (split.adapter < 0) {
    if (need_dx && layer == 0) {
      clear_dx<T>(arguments, split, first_column, columns);
    }
    return;
  }
  const Panel<T> panel(arguments.factor, row_of(arguments.factor, layer, split.adapter), panel_index, kRanks);
  if (panel.ranks == 0) {
    return;
  }
  const Dropout dropout = kDx ? dropout_of(arguments.dropout, layer, split.adapter) : Dropout{};
  const int first_rank = panel_index * kRanks;
  const int tile_count = split.tile_end - split.tile_begin;
  unsigned char* shared = shared_memory();
  Tile* tiles = reinterpret_cast<Tile*>(shared);
  const Block factor{reinterpret_cast<T*>(shared + Shape::kTileBytes)};
  const auto stage_of = [&](int i) {
    return shared + Shape::kTileBytes + Shape::kFactorBytes + i % Shape::kStages * Shape::kStageBytes;
  };
  const auto rows_of = [&](int i) { return Block{reinterpret_cast<T*>(stage_of(i))}; };
  const auto s_of = [&](int i) {
    return SharedTile<T, kRanks>{reinterpret_cast<T*>(stage_of(i) + Shape::kRowBytes)};
  };
  const auto fetch = [&](int i) {
    if (i < tile_count) {
      const Tile tile = tiles[i];
      load_rows<kTileRows>(
          rows_of(i),
          static_cast<const T*>(arguments.rows.data) + tile.row * arguments.rows.stride + first_column,
          arguments.rows.stride, tile.rows, columns, arguments.rows.aligned);
      load_rows<kTileRows>(s_of(i),
                           static_cast<const T*>(arguments.s.data) + layer * arguments.layer_stride +
                               tile.row * arguments.s.stride + first_rank,
                           arguments.s.stride, tile.rows, panel.ranks, arguments.s.aligned, kTileRows,
                           whole_blocks(panel.ranks));
    }
    commit_copies();
  };

  if (thread_index() < tile_count) {
    tiles[thread_index()] = arguments.tiles[split.tile_begin + thread_index()];
  }
  if (need_dx) {
    FactorLoad<T, kRanks, kBlockColumns, false>().begin(factor, panel, first_column, columns);
  }
  synchronize();
#pragma unroll
  for (int i = 0; i < Shape::kStages - 1; ++i) {
    fetch(i);
  }
  Fragment<Shape::kM, Shape::kN> sum;
  sum.clear();
  const int m = warp_index() % Shape::kWarpsM * 16 * Shape::kM;
  const int n = warp_index() / Shape::kWarpsM * 8 * Shape::kN;
#pragma unroll 1
  for (int i = 0; i < tile_count; ++i) {
    KeepBits<T, kTileRows, kBlockColumns> keep;
    if (dropout.threshold != 0) {
      keep.draw(dropout, tiles[i].philox_row, first_column);
    }
    wait_copies<Shape::kStages - 2>();
    unsigned char* keep_bytes = stage_of(i) + Shape::kRowBytes + Shape::kSBytes;
    if (dropout.threshold != 0) {
      keep.apply(rows_of(i));
      keep.store(keep_bytes);
    }
    synchronize();
    fetch(i + Shape::kStages - 1);
    add_product<Ranks::kRows, false, false, kTileRows>(sum, s_of(i), m, rows_of(i), n, 0, panel.ranks);
    if (need_dx) {
      Delta delta;
      delta.clear();
      add_delta(delta, s_of(i), factor, panel.ranks);
      if (dropout.threshold != 0) {
        uint32_t kept[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = delta_row() + fragment_row() + 8 * half;
          kept[half] = *reinterpret_cast<const uint32_t*>(
              keep_bytes + (row * kBlockColumns + delta_column()) / kCounterColumns);
        }
        drop(delta, kept, dropout.keep_scale);
      }
      T* out = static_cast<T*>(arguments.dx.data) + tiles[i].row * arguments.dx.stride + first_column;
      if (layer > 0) {
        add_existing(delta, out, arguments.dx.stride, tiles[i].rows, columns);
      }
      store_delta(delta, out, arguments.dx.stride, tiles[i].rows, columns, arguments.dx.aligned);
    }
  }
  sum.for_each([&](int rank, int column, float value) {
    if (m + rank < panel.ranks && n + column < columns) {
      write_gradient<T>(arguments, split, layer, first_rank + m + rank, first_column + n + column,
                        value * dropout.keep_scale);
    }
  });
}

}  // namespace mlora::cuda
