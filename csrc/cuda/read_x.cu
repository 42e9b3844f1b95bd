// dA = ds^T drop(x) of every layer and dx = sum of drop'(ds A) in one launch, under one mask each.
#include <type_traits>

#include "cuda/dispatch.cuh"
#include "cuda/gradient.cuh"

namespace mlora::cuda {
namespace {

// How many layers a program takes at once, where the device has the shared memory. Wide panels leave no
// registers for more than one, and fp16 is rare: then layers are launches one after the other, and the later
// ones add to dx.
template <typename T, int kRanks>
constexpr int kLayersAtOnce = std::is_same_v<T, BFloat16> && kRanks <= 64 ? 3 : 1;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kNeedsMore = true;  // registers, for the same code
#else
constexpr bool kNeedsMore = false;
#endif

// Blocks of a multiprocessor whose registers suffice without spilling. Without dropout a third one paid on an
// H100: 63.4 to 50.7 us for 8192 x 4096 and rank 16 (bench/results/gpu-h100/launches.txt, v1).
template <typename T, int kRanks, int kLayers, Masks kMasks>
constexpr int kBlocks = sizeof(T) == 4 || kRanks > 64 || (kLayers > 1 && kLayers * kRanks > 48) ||
                                (kNeedsMore && kRanks > 32 && kMasks == Masks::kDrawn)
                            ? 1
                        : kRanks <= 16 && kLayers == 1 && kMasks == Masks::kNone ? 3
                                                                                 : 2;

template <typename T, int kRanks, int kLayers, Masks kMasks, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kRanks, kLayers, kMasks>)
    read_x_kernel(const __grid_constant__ GradientArguments arguments, int first_layer, int first_panel) {
  gradient_split<T, kRanks, kLayers, true, kMasks, kAligned>(arguments, block_y(), first_layer, block_x(),
                                                             first_panel + block_z());
}

}  // namespace

int launch_read_x(const GradientArguments& arguments, const Queue& queue) {
  const int most_shared = most_shared_bytes(queue);
  const auto with_panel = [&](auto number, auto width, auto is_aligned) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    // dx is a sum over panels: then these too are launches one after the other, and the later ones add
    const int panels = panels_of(arguments.type, arguments.ranks);
    const int at_once = arguments.dx.data == nullptr ? panels : 1;
    const Grid grid = {ceil_div(arguments.columns, kBlockColumns), arguments.plan.split_count, at_once};
    const auto run = [&](auto layers, auto kernel, int layer, int panel) {
      return launch(kernel, grid, kThreads, kGradientShared<T, kRanks, decltype(layers)::value, true>, queue,
                    arguments, layer, panel);
    };
    const auto run_aligned = [&](auto layers, int layer, int panel) {
      constexpr int kLayers = decltype(layers)::value;
      return arguments.dropout.p == nullptr
                 ? run(layers, read_x_kernel<T, kRanks, kLayers, Masks::kNone, true>, layer, panel)
             : arguments.keep == nullptr
                 ? run(layers, read_x_kernel<T, kRanks, kLayers, Masks::kDrawn, true>, layer, panel)
                 : run(layers, read_x_kernel<T, kRanks, kLayers, Masks::kStored, true>, layer, panel);
    };
    int error = 0;
    for (int panel = 0; panel < panels; panel += at_once) {
      for (int layer = 0; layer < arguments.layers && error == 0;) {
        const int left = arguments.layers - layer;
        if constexpr (!decltype(is_aligned)::value) {
          error = run(Constant<1>{}, read_x_kernel<T, kRanks, 1, Masks::kDrawn, false>, layer++, panel);
        } else if constexpr (kLayersAtOnce<T, kRanks> == 1) {
          error = run_aligned(Constant<1>{}, layer++, panel);
        } else {
          const int fitting = most_shared >= kGradientShared<T, kRanks, 3, true>   ? 3
                              : most_shared >= kGradientShared<T, kRanks, 2, true> ? 2
                                                                                   : 1;
          const int count = left < fitting ? left : fitting;
          error = count == 3   ? run_aligned(Constant<3>{}, layer, panel)
                  : count == 2 ? run_aligned(Constant<2>{}, layer, panel)
                               : run_aligned(Constant<1>{}, layer, panel);
          layer += count;
        }
      }
    }
    return error;
  };
  return for_panel(arguments.type, arguments.ranks, arguments.aligned(), with_panel);
}

}  // namespace mlora::cuda
