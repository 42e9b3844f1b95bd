#include "cuda/dispatch.cuh"
#include "cuda/shrink.cuh"

namespace mlora::cuda {
namespace {

// Blocks of a multiprocessor whose registers suffice without spilling.
template <typename T, int kRanks>
constexpr int kBlocks = sizeof(T) == 4 ? (kRanks > 32 ? 1 : 2)
                        : kRanks <= 32 ? 3
                                       : 2;

// Layers are neighbours in the launch: the later ones find the rows in the cache.
template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kRanks>) shrink_kernel(ShrinkArguments arguments) {
  const int layers = arguments.layers;
  shrink_program<T, kRanks, true>(arguments, block_x() / layers, block_x() % layers, block_y(), block_z());
}

}  // namespace

int launch_shrink(const ShrinkArguments& arguments, const Queue& queue) {
  return for_panel(arguments.type, arguments.ranks, [&](auto number, auto width) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    const Grid grid = {int64_t{arguments.tile_count} * arguments.layers,
                       ceil_div(arguments.columns, kColumnSplit), ceil_div(arguments.ranks, kRanks)};
    return launch(shrink_kernel<T, kRanks>, grid, kThreads, ShrinkShape<T, kRanks>::kShared, queue.stream,
                  queue.device, arguments);
  });
}

}  // namespace mlora::cuda
