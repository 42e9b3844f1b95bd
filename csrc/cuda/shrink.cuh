// out [rows, R] = scaling keep_scale drop(rows) F^T of one tile, layer and panel of ranks, by one program, or
// by one for each quarter of the columns, the last of which adds the quarters up.
//
// Letters: F [r, d] one adapter's factor, r its rank, R the largest rank.
#pragma once

#include "cuda/dispatch.cuh"
#include "cuda/dropout_tile.cuh"
#include "cuda/factor_tile.cuh"
#include "cuda/fragments.cuh"
#include "cuda/tickets.cuh"

namespace mlora::cuda {

// Warps share a tile by rows and ranks. Two warps have the same place there: one sums the columns of even
// runs of 32, the other those of odd runs, whatever the panel's width, so that no bit depends on batch-mates'
// ranks.
template <typename T, int kRanks>
struct ShrinkShape {
  static constexpr int kColumns = (kRanks > 64 ? 128 : 256) / static_cast<int>(sizeof(T));
  // one program has a multiprocessor to itself where tiles are as many: so much must be under way
  static constexpr int kStages = kRanks <= 16 ? 4 : 3;
  static constexpr int kWarpsK = 2;
  static constexpr int kDepth = 32;
  static constexpr int kWarpsN = kRanks >= 64 ? 2 : 1;
  static constexpr int kWarpsM = kThreads / 32 / (kWarpsK * kWarpsN);
  static constexpr int kM = kTileRows / 16 / kWarpsM;
  static constexpr int kN = kRanks / 8 / kWarpsN;
  // whether fp32 numbers of the next factor tile wait in registers during the products
  static constexpr bool kDefer = kRanks <= 16;
  static constexpr int kRowBytes = SharedTile<T, kColumns>::bytes(kTileRows);
  static constexpr int kStageBytes = kRowBytes + SharedTile<T, kColumns>::bytes(kRanks);
  static constexpr int kSumBytes = kWarpsK * kTileRows * kRanks * 4;
  static constexpr int kShared = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
};

// f(place, row, rank) for each number of the panel's columns of one layer's result.
template <typename Function>
__device__ inline void for_each_shrunk(const ShrinkArguments& arguments, const Tile& tile, int layer,
                                       int first, int width, Function&& f) {
  const int64_t start = layer * arguments.rows_total;
  for (int index = thread_index(); index < tile.rows * width; index += kThreads) {
    const int row = index / width;
    const int rank = index % width;
    f((start + tile.row + row) * arguments.ranks + first + rank, row, rank);
  }
}

// Stores which elements of the tile are kept, from `column` on.
template <typename T, int kColumns>
__device__ inline void store_keep_bits(const ShrinkArguments& arguments, const Tile& tile, int layer,
                                       int column, const KeepBits<T, kTileRows, kColumns>& keep) {
  using Keep = KeepBits<T, kTileRows, kColumns>;
#pragma unroll
  for (int i = 0; i < Keep::kOwn; ++i) {
    const uint32_t word = keep.whole_word(i);
    const int row = Keep::Own::row(i);
    const int first = column + Keep::word() * kWordColumns;
    if (Keep::Own::chunk() * Keep::kChunk % kWordColumns == 0 && row < tile.rows &&
        first < arguments.columns) {
      write(
          arguments.keep + word_place(arguments.rows_total, arguments.columns, layer, tile.row + row, first),
          word);
    }
  }
}

// The panel's ranks from `first_rank` on, of which `width` belong to the result; kRanks hold the adapter's
// own.
template <typename T, int kRanks, bool kDrops, bool kAligned>
__device__ inline void shrink_program(const ShrinkArguments& arguments, const Tile& tile, int ticket,
                                      int layer, int quarter, int first_rank, int width) {
  using Shape = ShrinkShape<T, kRanks>;
  using Stage = SharedTile<T, Shape::kColumns>;
  const auto write_result = [&](int64_t place, float value) {
    T rounded;
    from_float(value, rounded);
    write(static_cast<T*>(arguments.out) + place, rounded);
  };
  if (tile.rows == 0) {
    return;
  }
  if (tile.adapter < 0 || row_of(arguments.factor, layer, tile.adapter).rank <= first_rank) {
    if (quarter == 0) {
      for_each_shrunk(arguments, tile, layer, first_rank, width,
                      [&](int64_t place, int, int) { write_result(place, 0.0f); });
    }
    return;
  }
  const Panel<T> panel(arguments.factor, row_of(arguments.factor, layer, tile.adapter), first_rank, kRanks);
  const Dropout dropout = dropout_of(arguments.dropout, layer, tile.adapter);
  const bool drops = kDrops && dropout.threshold != 0;
  const int of_quarter = quarter_of(arguments.columns);
  const int begin = arguments.parts > 1 ? quarter * of_quarter : 0;
  const int end = arguments.parts > 1 ? clamp(arguments.columns, begin + of_quarter) : arguments.columns;
  const int steps = ceil_div(end - begin, Shape::kColumns);
  const int steps_of_quarter = of_quarter / Shape::kColumns;
  const T* source = row_at(static_cast<const T*>(arguments.rows.data), arguments.rows.stride, tile.row);
  unsigned char* shared = shared_memory();
  const auto rows_of = [&](int stage) {
    return Stage{reinterpret_cast<T*>(shared + stage * Shape::kStageBytes)};
  };
  const auto factor_of = [&](int stage) {
    return Stage{reinterpret_cast<T*>(shared + stage * Shape::kStageBytes + Shape::kRowBytes)};
  };
  FactorLoad<T, kRanks, Shape::kColumns, Shape::kDefer, kAligned> factor;
  const auto fetch = [&](int step, int stage) {
    if (step < steps) {
      const int column = begin + step * Shape::kColumns;
      load_rows<kTileRows, kAligned>(rows_of(stage), source + column, arguments.rows.stride, tile.rows,
                                     end - column);
      factor.begin(factor_of(stage), panel, column, end - column);
    }
    commit_copies();
  };
  const auto finish = [&](int step, int stage) {
    if (step < steps) {
      factor.end(factor_of(stage), panel);
    }
  };

  Fragment<Shape::kM, Shape::kN> sum, all;  // of this quarter, and of those before
  sum.clear();
  all.clear();
  const int warp = warp_index();
  const int half = warp / (Shape::kWarpsM * Shape::kWarpsN);
  const int m = warp % Shape::kWarpsM * 16 * Shape::kM;
  const int n = warp / Shape::kWarpsM % Shape::kWarpsN * 8 * Shape::kN;
#pragma unroll
  for (int step = 0; step < Shape::kStages - 1; ++step) {
    fetch(step, step);
    finish(step, step);
  }
  int stage = 0;
  int left = steps_of_quarter;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    KeepBits<T, kTileRows, Shape::kColumns> keep;
    if (drops) {
      keep.draw(dropout, tile.philox_row, begin + step * Shape::kColumns);
    }
    wait_copies<Shape::kStages - 2>();
    if (drops) {
      keep.apply(rows_of(stage), rows_of(stage));
      if (arguments.keep != nullptr && first_rank == 0) {
        store_keep_bits(arguments, tile, layer, begin + step * Shape::kColumns, keep);
      }
    }
    synchronize();
    const int free_stage = stage == 0 ? Shape::kStages - 1 : stage - 1;
    fetch(step + Shape::kStages - 1, free_stage);
#pragma unroll
    for (int k = 0; k < Shape::kColumns; k += Shape::kWarpsK * Shape::kDepth) {
      add_product<Ranks::kColumns, true, true, Shape::kDepth>(sum, rows_of(stage), m, factor_of(stage), n,
                                                              k + half * Shape::kDepth, panel.ranks);
    }
    finish(step + Shape::kStages - 1, free_stage);
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    if (--left == 0) {
      all.add(sum);
      sum.clear();
      left = steps_of_quarter;
    }
  }
  all.add(sum);

  wait_copies<0>();
  synchronize();
  float* sums = reinterpret_cast<float*>(shared);
  const auto sum_of = [&](int of_half, int row, int rank) -> float& {
    return sums[(of_half * kTileRows + row) * kRanks + rank];
  };
  all.for_each([&](int row, int rank, float value) { sum_of(half, m + row, n + rank) = value; });
  synchronize();
  const float scale = read(arguments.scaling + tile.adapter) * dropout.keep_scale;
  if (arguments.parts == 1) {
    for_each_shrunk(arguments, tile, layer, first_rank, width, [&](int64_t place, int row, int rank) {
      write_result(place, rank < panel.ranks ? scale * (sum_of(0, row, rank) + sum_of(1, row, rank)) : 0.0f);
    });
    return;
  }
  // Of partial sums only the adapter's own ranks.
  const int64_t numbers = arguments.layers * arguments.rows_total * arguments.ranks;
  const auto partial = [&](int of_quarter, int of_half) {
    return arguments.partial.sums + (of_quarter * Shape::kWarpsK + of_half) * numbers;
  };
  for_each_shrunk(arguments, tile, layer, first_rank, panel.ranks, [&](int64_t place, int row, int rank) {
    for (int k = 0; k < Shape::kWarpsK; ++k) {
      write(partial(quarter, k) + place, sum_of(k, row, rank));
    }
  });
  if (is_last(arguments.partial.tickets + ticket, arguments.parts)) {
    for_each_shrunk(arguments, tile, layer, first_rank, width, [&](int64_t place, int, int rank) {
      float value[Shape::kWarpsK] = {};
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) {
        for (int k = 0; i < arguments.parts && rank < panel.ranks && k < Shape::kWarpsK; ++k) {
          value[k] += load_shared_sum(partial(i, k) + place);
        }
      }
      write_result(place, rank < panel.ranks ? scale * (value[0] + value[1]) : 0.0f);
    });
  }
}

// Of the panel's programs: those of narrower panels have other shapes.
template <typename T, int kRanks>
constexpr int kShrinkShared = larger(ShrinkShape<T, kRanks>::kShared,
                                     kNarrows<T, kRanks> ? kShrinkShared<T, larger(kRanks / 2, 16)> : 0);
template <typename T>
constexpr int kShrinkShared<T, 16> = ShrinkShape<T, 16>::kShared;

// One program of a launch whose panels hold kRanks; it takes the width of its adapter's own.
template <typename T, int kRanks, bool kDrops, bool kAligned>
__device__ inline void shrink_tile(const ShrinkArguments& arguments, int tile_index, int layer, int quarter,
                                   int panel) {
  const Tile tile = read(arguments.plan.tiles + tile_index);
  const int first_rank = panel * kRanks;
  const int ranks = tile.adapter < 0
                        ? 0
                        : panel_ranks(row_of(arguments.factor, layer, tile.adapter).rank, first_rank, kRanks);
  const int ticket = (panel * arguments.layers + layer) * arguments.plan.tile_count + tile_index;
  for_own_width<T, kAligned, kRanks>(ranks, [&](auto width) {
    shrink_program<T, decltype(width)::value, kDrops, kAligned>(
        arguments, tile, ticket, layer, quarter, first_rank, clamp(arguments.ranks - first_rank, kRanks));
  });
}

}  // namespace mlora::cuda
