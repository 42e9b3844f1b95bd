#include "cuda/dispatch.cuh"
#include "cuda/shrink.cuh"

namespace mlora::cuda {
namespace {

// Blocks of a multiprocessor whose registers suffice without spilling.
template <typename T, int kRanks>
constexpr int kBlocks = sizeof(T) == 4 && kRanks > 32 ? 1 : 2;

// Layers are neighbours in the launch: the later ones find the rows in the cache.
template <typename T, int kRanks, bool kDrops>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kRanks>)
    shrink_kernel(const __grid_constant__ ShrinkArguments arguments) {
  const int layers = arguments.layers;
  shrink_program<T, kRanks, kDrops>(arguments, block_x() / layers, block_x() % layers, block_y(), block_z());
}

}  // namespace

int launch_shrink(const ShrinkArguments& arguments, const Queue& queue) {
  return for_panel(arguments.type, arguments.ranks, [&](auto number, auto width) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    const Grid grid = {int64_t{arguments.plan.tile_count} * arguments.layers,
                       ceil_div(arguments.columns, kColumnSplit), panels_of(arguments.type, arguments.ranks)};
    const auto run = [&](auto kernel) {
      return launch(kernel, grid, kThreads, ShrinkShape<T, kRanks>::kShared, queue, arguments);
    };
    return arguments.drops ? run(shrink_kernel<T, kRanks, true>) : run(shrink_kernel<T, kRanks, false>);
  });
}

}  // namespace mlora::cuda
