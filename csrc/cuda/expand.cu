// y = bias + s F of every layer, a tile and a few blocks of columns a program; also dx = drop'(ds F), the sum
// over layers, where read_x does not make it.
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
  Delta kept;
  kept.clear();
  add_kept(kept, sum, keep);
  sum = kept;
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
  FactorLoad<T, kRanks, kBlockColumns, (kRanks <= 16)> factor;
  const auto fetch = [&](int step) {
    if (served && step < steps) {
      const int column = (first_block + step / panels) * kBlockColumns;
      const Panel<T> panel(output.factor, *row, step % panels, kRanks);
      // where there is one panel, the tile of s stays
      if (step < Shape::kSTiles || panels > 1) {
        load_rows<kTileRows>(s_of(step), s + step % panels * kRanks, arguments.s.stride, tile.rows,
                             panel.ranks, arguments.s.aligned, kTileRows, whole_blocks(panel.ranks));
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
      store_delta(sum, out, output.out.stride, tile.rows, columns, output.out.aligned);
    }
  }
}

template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kRanks>)
    expand_kernel(const __grid_constant__ ExpandArguments arguments) {
  if (!arguments.adds_up) {
    int layer = 0;
    while (layer + 1 < arguments.layers && arguments.output[layer + 1].first_block <= block_y()) {
      ++layer;
    }
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
  int blocks = 0;
  for (int i = 0; i < (arguments.adds_up ? 1 : arguments.layers); ++i) {
    arguments.output[i].first_block = blocks;
    blocks += ceil_div(arguments.output[i].columns, kBlockColumns * kExpandBlocks);
  }
  return for_panel(arguments.type, arguments.ranks, [&](auto number, auto width) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    return launch(expand_kernel<T, kRanks>, Grid{arguments.plan.tile_count, blocks}, kThreads,
                  ExpandShape<T, kRanks>::kShared, queue, arguments);
  });
}

}  // namespace mlora::cuda
