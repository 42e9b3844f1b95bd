// y = bias + s F of every layer: one block of columns of the tiles of one split a program. The factor stays.
//
// Letters: F [r, d] one adapter's factor, r its rank, R the largest rank.
#include "cuda/delta.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/factor_tile.cuh"

namespace mlora::cuda {
namespace {

template <typename T, int kRanks>
struct ExpandShape {
  static constexpr int kStages = 3;
  static constexpr int kSBytes = SharedTile<T, kRanks>::bytes(kTileRows);
  static constexpr int kTileBytes = kSplitTiles * static_cast<int>(sizeof(Tile));
  static constexpr int kFactorBytes = SharedTile<T, kBlockColumns>::bytes(kRanks);
  static constexpr int kTurn = kTileBytes + kFactorBytes + kStages * kSBytes;
  static constexpr int kShared = kTurn + (sizeof(T) == 2 ? kTurnBytes : 0);
};

template <typename T>
__device__ inline void start_with_bias(Delta& sum, const T* bias, int columns) {
  sum.clear();
  if (bias != nullptr) {
    sum.for_each([&](int, int column, float& value) {
      if (delta_column() + column < columns) {
        value = to_float(read(bias + delta_column() + column));
      }
    });
  }
}

// Blocks of a multiprocessor whose registers suffice without spilling. A third one paid on an H100: 29.4 to
// 28.7 us for 8192 x 4096 and rank 16 (bench/results/gpu-h100/launches.txt, v1).
template <int kRanks>
constexpr int kBlocks = kRanks <= 16 ? 3 : 2;

// Panels are launches one after the other: the later ones add to what the first has written.
template <typename T, int kRanks, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks<kRanks>)
    expand_kernel(const __grid_constant__ ExpandArguments arguments, int panel_index) {
  using Shape = ExpandShape<T, kRanks>;
  int layer = 0;
  while (layer + 1 < arguments.layers && arguments.output[layer + 1].first_block <= block_y()) {
    ++layer;
  }
  const ExpandOutput& output = arguments.output[layer];
  const Split split = read(arguments.plan.splits + block_x());
  const int tile_count = split.tile_end - split.tile_begin;
  const bool served = split.adapter >= 0;
  const bool add = arguments.add || panel_index > 0;
  const FactorRow& row = row_of(output.factor, 0, served ? split.adapter : 0);
  const Panel<T> panel(output.factor, row, panel_index * kRanks, kRanks);
  if (tile_count == 0 || (add && (!served || panel.ranks == 0))) {
    return;
  }
  const int column = (block_y() - output.first_block) * kBlockColumns;
  const int columns = output.columns - column;
  const T* s =
      static_cast<const T*>(arguments.s.data) + layer * arguments.layer_stride + panel_index * kRanks;
  unsigned char* shared = shared_memory();
  Tile* tiles = reinterpret_cast<Tile*>(shared);
  const SharedTile<T, kBlockColumns> factor{reinterpret_cast<T*>(shared + Shape::kTileBytes)};
  const auto s_of = [&](int i) {
    return SharedTile<T, kRanks>{reinterpret_cast<T*>(shared + Shape::kTileBytes + Shape::kFactorBytes +
                                                      i % Shape::kStages * Shape::kSBytes)};
  };
  const auto fetch = [&](int i) {
    if (served && i < tile_count) {
      load_rows<kTileRows, kAligned>(s_of(i), row_at(s, arguments.s.stride, tiles[i].row), arguments.s.stride,
                                     tiles[i].rows, panel.ranks, kTileRows, whole_blocks(panel.ranks));
    }
    commit_copies();
  };
  if (thread_index() < tile_count) {
    tiles[thread_index()] = read(arguments.plan.tiles + split.tile_begin + thread_index());
  }
  if (served) {
    FactorLoad<T, kRanks, kBlockColumns, false, kAligned>().begin(factor, panel, column, columns);
  }
  synchronize();
#pragma unroll
  for (int i = 0; i < Shape::kStages - 1; ++i) {
    fetch(i);
  }
  Delta start;
  const bool biased = output.bias != nullptr && panel_index == 0;
  start_with_bias(start, biased ? static_cast<const T*>(output.bias) + column : nullptr, columns);
#pragma unroll 1
  for (int i = 0; i < tile_count; ++i) {
    wait_copies<Shape::kStages - 2>();
    synchronize();
    fetch(i + Shape::kStages - 1);
    Delta sum = start;
    add_delta(sum, s_of(i), factor, served ? panel.ranks : 0);
    T* out = row_at(static_cast<T*>(output.out.data), output.out.stride, tiles[i].row) + column;
    if (add) {
      add_existing(sum, out, output.out.stride, tiles[i].rows, columns);
    }
    store_delta<kAligned>(sum, out, output.out.stride, tiles[i].rows, columns, shared + Shape::kTurn);
  }
}

}  // namespace

int launch_expand(ExpandArguments arguments, const Queue& queue) {
  int blocks = 0;
  bool aligned = arguments.s.aligned;
  for (int i = 0; i < arguments.layers; ++i) {
    ExpandOutput& output = arguments.output[i];
    output.first_block = blocks;
    blocks += ceil_div(output.columns, kBlockColumns);
    aligned = aligned && output.out.aligned && output.factor.aligned && output.columns % 8 == 0;
  }
  return for_panel(arguments.type, arguments.ranks, aligned, [&](auto number, auto width, auto is_aligned) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    int error = 0;
    for (int panel = 0; panel < panels_of(arguments.type, arguments.ranks) && error == 0; ++panel) {
      error = launch(expand_kernel<T, kRanks, decltype(is_aligned)::value>,
                     Grid{arguments.plan.split_count, blocks}, kThreads, ExpandShape<T, kRanks>::kShared,
                     queue, arguments, panel);
    }
    return error;
  });
}

}  // namespace mlora::cuda
