// y = bias + s F of every layer. Also dx = drop'(ds F), the sum over layers, where it is a sum over panels.
//
// Letters: F [r, d] one adapter's factor, r its rank, R the largest rank.
#include "cuda/delta.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/factor_tile.cuh"

namespace mlora::cuda {
namespace {

// Blocks of a multiprocessor whose registers suffice without spilling.
template <typename T, int kRanks>
constexpr int kBlocks = sizeof(T) == 2 && kRanks <= 16 ? 3 : 2;

constexpr int kExpandBlocks = 4;  // blocks of columns that a program takes one after the other
constexpr int kStages = 2;

template <typename T, int kRanks>
struct ExpandShape {
  static constexpr bool kPanels = kRanks == widest_panel(sizeof(T) == 4 ? Scalar::kFloat : Scalar::kHalf);
  static constexpr int kSTiles = kPanels ? kStages : 1;
  static constexpr int kSBytes = SharedTile<T, kRanks>::bytes(kTileRows);
  static constexpr int kFactorBytes = SharedTile<T, kBlockColumns>::bytes(kRanks);
  static constexpr int kShared = kSTiles * kSBytes + kStages * kFactorBytes;
};

template <typename T, int kRanks>
struct UsualShape {
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

// Clears what is dropped. Each of a row's four lanes draws one counter of eight columns.
__device__ inline void drop_here(Delta& sum, const Dropout& dropout, uint32_t philox_row, int first_column) {
  const int block = lane_index() % 4;
  const uint32_t counter = static_cast<uint32_t>((first_column + delta_column()) / kCounterColumns + block);
  uint32_t keep[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t row = philox_row + static_cast<uint32_t>(delta_row() + fragment_row() + 8 * half);
    keep[half] = keep_bits(philox(dropout, row, counter), dropout.threshold) << (4 * block);
    keep[half] |= exchange(keep[half], 1);
    keep[half] |= exchange(keep[half], 2);
  }
  add_kept(sum, Delta(sum), keep, true);
}

// One layer's part of a program, which writes to an output, or adds to it.
template <typename T, int kRanks>
__device__ inline void expand_layer(const ExpandArguments& arguments, const ExpandOutput& output, int layer,
                                    int factor_layer, bool add) {
  using Shape = ExpandShape<T, kRanks>;
  using Block = SharedTile<T, kBlockColumns>;
  const Tile tile = read(arguments.plan.tiles + block_x());
  const bool served = tile.adapter >= 0;
  if (tile.rows == 0 || (add && !served)) {
    return;
  }
  const int first_block = (block_y() - output.first_block) * kExpandBlocks;
  const int last_block = clamp(ceil_div(output.columns, kBlockColumns), first_block + kExpandBlocks);
  const FactorRow* row = &row_of(output.factor, factor_layer, served ? tile.adapter : 0);
  const int panels = served ? ceil_div(row->rank, kRanks) : 1;
  const Dropout dropout = served ? dropout_of(arguments.dropout, layer, tile.adapter) : Dropout{};
  const T* s = static_cast<const T*>(arguments.s.data) + layer * arguments.layer_stride +
               tile.row * arguments.s.stride;
  const T* bias = static_cast<const T*>(output.bias);
  const int steps = (last_block - first_block) * panels;
  unsigned char* shared = shared_memory();
  const auto s_of = [&](int step) {
    return SharedTile<T, kRanks>{reinterpret_cast<T*>(shared + step % Shape::kSTiles * Shape::kSBytes)};
  };
  const auto factor_of = [&](int step) {
    return Block{reinterpret_cast<T*>(shared + Shape::kSTiles * Shape::kSBytes +
                                      step % kStages * Shape::kFactorBytes)};
  };
  FactorLoad<T, kRanks, kBlockColumns, (kRanks <= 16), false> factor;
  const auto fetch = [&](int step) {
    if (served && step < steps) {
      const int column = (first_block + step / panels) * kBlockColumns;
      const Panel<T> panel(output.factor, *row, step % panels, kRanks);
      // where there is one panel, the tile of s stays
      if (step < Shape::kSTiles || panels > 1) {
        load_rows<kTileRows, false>(s_of(step), s + step % panels * kRanks, arguments.s.stride, tile.rows,
                                    panel.ranks, kTileRows, whole_blocks(panel.ranks));
      }
      factor.begin(factor_of(step), panel, column, output.columns - column);
    }
    commit_copies();
  };
  const auto finish = [&](int step) {
    if (served && step < steps) {
      factor.end(factor_of(step), Panel<T>(output.factor, *row, step % panels, kRanks));
    }
  };

  Delta sum;
  fetch(0);
  finish(0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int column = (first_block + step / panels) * kBlockColumns;
    const int columns = output.columns - column;
    wait_copies<0>();
    synchronize();
    fetch(step + 1);
    if (step % panels == 0) {
      start_with_bias(sum, bias == nullptr ? nullptr : bias + column, columns);
    }
    if (served) {
      add_delta(sum, s_of(step), factor_of(step), panel_ranks(row->rank, step % panels, kRanks));
    }
    finish(step + 1);
    if (step % panels == panels - 1) {
      if (dropout.threshold != 0) {
        drop_here(sum, dropout, tile.philox_row, column);
      }
      T* out = static_cast<T*>(output.out.data) + tile.row * output.out.stride + column;
      if (add) {
        add_existing(sum, out, output.out.stride, tile.rows, columns);
      }
      store_delta<false>(sum, out, output.out.stride, tile.rows, columns, nullptr);
    }
  }
}

// Number of the output that block `block` of the launch belongs to.
__device__ inline int output_of(const ExpandArguments& arguments, int block) {
  int output = 0;
  while (output + 1 < arguments.layers && arguments.output[output + 1].first_block <= block) {
    ++output;
  }
  return output;
}

// The usual case, aligned and one panel: one block of columns of the tiles of one split. The factor stays.
template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads, 2)
    expand_kernel(const __grid_constant__ ExpandArguments arguments) {
  using Shape = UsualShape<T, kRanks>;
  const int layer = output_of(arguments, block_y());
  const ExpandOutput& output = arguments.output[layer];
  const Split split = read(arguments.plan.splits + block_x());
  const int tile_count = split.tile_end - split.tile_begin;
  const bool served = split.adapter >= 0;
  if (tile_count == 0 || (arguments.add && !served)) {
    return;
  }
  const int column = (block_y() - output.first_block) * kBlockColumns;
  const int columns = output.columns - column;
  const int ranks = served ? static_cast<int>(row_of(output.factor, 0, split.adapter).rank) : 0;
  const T* s = static_cast<const T*>(arguments.s.data) + layer * arguments.layer_stride;
  unsigned char* shared = shared_memory();
  Tile* tiles = reinterpret_cast<Tile*>(shared);
  const SharedTile<T, kBlockColumns> factor{reinterpret_cast<T*>(shared + Shape::kTileBytes)};
  const auto s_of = [&](int i) {
    return SharedTile<T, kRanks>{reinterpret_cast<T*>(shared + Shape::kTileBytes + Shape::kFactorBytes +
                                                      i % Shape::kStages * Shape::kSBytes)};
  };
  const auto fetch = [&](int i) {
    if (served && i < tile_count) {
      load_rows<kTileRows, true>(s_of(i), row_at(s, arguments.s.stride, tiles[i].row), arguments.s.stride,
                                 tiles[i].rows, ranks, kTileRows, whole_blocks(ranks));
    }
    commit_copies();
  };
  if (thread_index() < tile_count) {
    tiles[thread_index()] = read(arguments.plan.tiles + split.tile_begin + thread_index());
  }
  if (served) {
    const Panel<T> panel(output.factor, row_of(output.factor, 0, split.adapter), 0, kRanks);
    FactorLoad<T, kRanks, kBlockColumns, false, true>().begin(factor, panel, column, columns);
  }
  synchronize();
#pragma unroll
  for (int i = 0; i < Shape::kStages - 1; ++i) {
    fetch(i);
  }
  Delta start;
  start_with_bias(start, output.bias == nullptr ? nullptr : static_cast<const T*>(output.bias) + column,
                  columns);
#pragma unroll 1
  for (int i = 0; i < tile_count; ++i) {
    wait_copies<Shape::kStages - 2>();
    synchronize();
    fetch(i + Shape::kStages - 1);
    Delta sum = start;
    add_delta(sum, s_of(i), factor, ranks);
    T* out = row_at(static_cast<T*>(output.out.data), output.out.stride, tiles[i].row) + column;
    if (arguments.add) {
      add_existing(sum, out, output.out.stride, tiles[i].rows, columns);
    }
    store_delta<true>(sum, out, output.out.stride, tiles[i].rows, columns, shared + Shape::kTurn);
  }
}

// Any strides and ranks: one tile and a few blocks of columns.
template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kRanks>)
    expand_any_kernel(const __grid_constant__ ExpandArguments arguments) {
  if (!arguments.adds_up) {
    const int layer = output_of(arguments, block_y());
    expand_layer<T, kRanks>(arguments, arguments.output[layer], layer, 0, arguments.add);
    return;
  }
#pragma unroll 1
  for (int layer = 0; layer < arguments.layers; ++layer) {
    if (layer > 0) {
      synchronize();  // the result is read again, and shared memory is free
    }
    expand_layer<T, kRanks>(arguments, arguments.output[0], layer, layer, arguments.add || layer > 0);
  }
}

}  // namespace

int launch_expand(ExpandArguments arguments, const Queue& queue) {
  const int outputs = arguments.adds_up ? 1 : arguments.layers;
  bool usual = arguments.s.aligned && !arguments.adds_up && panels_of(arguments.type, arguments.ranks) == 1;
  for (int i = 0; i < outputs; ++i) {
    const ExpandOutput& output = arguments.output[i];
    usual = usual && output.out.aligned && output.factor.aligned && output.columns % 8 == 0;
  }
  int blocks = 0;
  for (int i = 0; i < outputs; ++i) {
    arguments.output[i].first_block = blocks;
    blocks += ceil_div(arguments.output[i].columns, kBlockColumns * (usual ? 1 : kExpandBlocks));
  }
  return for_panel(arguments.type, arguments.ranks, usual, [&](auto number, auto width, auto is_usual) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    if constexpr (decltype(is_usual)::value) {
      return launch(expand_kernel<T, kRanks>, Grid{arguments.plan.split_count, blocks}, kThreads,
                    UsualShape<T, kRanks>::kShared, queue, arguments);
    } else {
      return launch(expand_any_kernel<T, kRanks>, Grid{arguments.plan.tile_count, blocks}, kThreads,
                    ExpandShape<T, kRanks>::kShared, queue, arguments);
    }
  });
}

}  // namespace mlora::cuda
