#include "cuda/dispatch.cuh"
#include "cuda/shrink.cuh"

namespace mlora::cuda {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kNeedsMore = true;  // registers, for the same code
#else
constexpr bool kNeedsMore = false;
#endif

// Blocks of a multiprocessor whose registers suffice without spilling.
template <typename T, int kRanks, bool kDrops>
constexpr int kBlocks = kRanks > (sizeof(T) == 4 || (kNeedsMore && kDrops) ? 32 : 64) ? 1 : 2;

// Layers are neighbours in the launch: the later ones find the rows in the cache.
template <typename T, int kRanks, bool kDrops, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kRanks, kDrops>)
    shrink_kernel(const __grid_constant__ ShrinkArguments arguments) {
  shrink_tile<T, kRanks, kDrops, kAligned>(arguments, block_x() / arguments.layers,
                                           block_x() % arguments.layers, block_y(), block_z());
}

}  // namespace

int launch_shrink(const ShrinkArguments& arguments, const Queue& queue) {
  const bool aligned = arguments.rows.aligned && arguments.factor.aligned && arguments.columns % 8 == 0;
  return for_panel(arguments.type, arguments.ranks, aligned, [&](auto number, auto width, auto is_aligned) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    const Grid grid = {int64_t{arguments.plan.tile_count} * arguments.layers, arguments.parts,
                       panels_of(arguments.type, arguments.ranks)};
    const auto run = [&](auto kernel) {
      return launch(kernel, grid, kThreads, kShrinkShared<T, kRanks>, queue, arguments);
    };
    constexpr bool kAligned = decltype(is_aligned)::value;
    return arguments.drops ? run(shrink_kernel<T, kRanks, true, kAligned>)
                           : run(shrink_kernel<T, kRanks, false, kAligned>);
  });
}

}  // namespace mlora::cuda
