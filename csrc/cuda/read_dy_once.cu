// Kernels and launcher of read_dy in one pass over dy; read_dy_once.cuh says how it is made.
#include <algorithm>

#include "cuda/read_dy_once.cuh"

namespace mlora::cuda {

#if defined(MLORA_EMULATE) || defined(MLORA_SM90A)
namespace {

// Up to 32 ranks two blocks share a multiprocessor: one computes while the other begins or ends. Wider ones
// have it alone, and copy three tiles ahead.
constexpr int kNarrow = 32;
template <int kMost>
constexpr int kStages = kMost > kNarrow ? 4 : 2;

#if defined(MLORA_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// ds of a split's tiles that no ranks of the panel belong to.
template <typename T>
MLORA_DEVICE void clear_ds(const ShrinkArguments& ds, const Split& split, int first_rank) {
  const int block = cluster_rank<kOnceCluster>(), own_rows = kTileRows / kOnceCluster;
  const int width = clamp(ds.ranks - first_rank, kOnceRanks);
  for (int i = split.tile_begin; i < split.tile_end; ++i) {
    const Tile tile = read(ds.plan.tiles + i);
    for (int index = thread_index(); index < own_rows * width; index += kThreads) {
      const int row = block + index / width * kOnceCluster;
      if (row < tile.rows) {
        write(static_cast<T*>(ds.out) + int64_t{tile.row + row} * ds.ranks + first_rank + index % width, T{});
      }
    }
  }
}
#endif

// Clusters are, layer by layer and split by split, those of columns, and of each the panels of ranks.
template <typename T, int kMost>
__global__ void __launch_bounds__(kThreads, kMost > kNarrow ? 1 : 2)
    read_dy_once_kernel(const __grid_constant__ ReadDyArguments arguments) {
#if defined(MLORA_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  int layer = 0;
  while (arguments.first_program[layer + 1] <= block_x()) {
    ++layer;
  }
  const GradientArguments& gradient = arguments.gradient[layer];
  const int panels = ceil_div(gradient.ranks, kOnceRanks);
  const int clusters = once_clusters(gradient.columns);
  const int index = (block_x() - arguments.first_program[layer]) / kOnceCluster;
  const int split_index = index / (panels * clusters);
  const int cluster = index / panels % clusters;
  const int panel = index % panels;
  const Split split = read(gradient.plan.splits + split_index);
  const int ranks = split.adapter < 0 ? 0
                                      : panel_ranks(row_of(gradient.factor, 0, split.adapter).rank,
                                                    panel * kOnceRanks, kOnceRanks);
  if (ranks == 0) {
    if (arguments.need_ds && cluster == 0) {
      clear_ds<T>(arguments.ds[layer], split, panel * kOnceRanks);
    }
    return;
  }
  for_own_width<T, true, kMost>(ranks, [&](auto width) {
    OnceBlock<T, decltype(width)::value, kStages<kMost>>(arguments, layer, split, cluster, panel,
                                                         split_index * panels + panel)
        .run();
  });
#endif
}

}  // namespace

bool reads_dy_once(const ReadDyArguments& arguments, const Queue& queue) {
  const auto is_suited = [&](const GradientArguments& gradient) {
    return gradient.type != Scalar::kFloat && gradient.rows.aligned && gradient.columns % 8 == 0 &&
           gradient.columns > 0;
  };
  return arguments.once && is_hopper(queue) &&
         most_shared_bytes(queue) >= OnceShape<kOnceRanks, kStages<kOnceRanks>>::kShared &&
         std::all_of(arguments.gradient, arguments.gradient + arguments.layers, is_suited);
}

int launch_read_dy_once(ReadDyArguments arguments, const Queue& queue) {
  const GradientArguments& any = arguments.gradient[0];
  const int panels = ceil_div(any.ranks, kOnceRanks);
  int64_t programs = 0;
  for (int layer = 0; layer < arguments.layers; ++layer) {
    programs += int64_t{any.plan.split_count} * once_clusters(arguments.gradient[layer].columns) * panels *
                kOnceCluster;
    arguments.first_program[layer + 1] = static_cast<int>(programs < INT32_MAX ? programs : INT32_MAX);
  }
  const auto run = [&](auto number, auto most) {
    constexpr int kMost = decltype(most)::value;
    return launch(read_dy_once_kernel<decltype(number), kMost>, Grid{programs, 1, 1, kOnceCluster}, kThreads,
                  OnceShape<kMost, kStages<kMost>>::kShared, queue, arguments);
  };
  const auto with = [&](auto number) {
    return any.ranks <= kNarrow ? run(number, Constant<kNarrow>{}) : run(number, Constant<kOnceRanks>{});
  };
  return any.type == Scalar::kHalf ? with(Half{}) : with(BFloat16{});
}

#else

bool reads_dy_once(const ReadDyArguments&, const Queue&) { return false; }
int launch_read_dy_once(ReadDyArguments, const Queue&) { return kNotSupported; }

#endif

}  // namespace mlora::cuda
