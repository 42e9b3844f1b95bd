// dA = ds^T drop(x) of every layer and dx = sum of drop'(ds A) in one launch, under one mask each.
#include <type_traits>

#include "cuda/dispatch.cuh"
#include "cuda/gradient.cuh"

namespace mlora::cuda {
namespace {

// How many layers a program takes at once. Wide panels leave no registers for more than one, and fp16 is
// rare: then layers are launches one after the other, and the later ones add to dx.
template <typename T, int kRanks>
constexpr int kLayersAtOnce = std::is_same_v<T, BFloat16> && kRanks <= 64 ? 3 : 1;

// Blocks of a multiprocessor whose registers suffice without spilling.
template <typename T, int kRanks, int kLayers>
constexpr int kBlocks = sizeof(T) == 4 || kRanks > 64 || (kLayers > 1 && kLayers * kRanks > 48) ? 1 : 2;

template <typename T, int kRanks, int kLayers, Masks kMasks, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kRanks, kLayers>)
    read_x_kernel(const __grid_constant__ GradientArguments arguments, int first_layer) {
  gradient_program<T, kRanks, kLayers, true, kMasks, kAligned>(arguments, block_y(), first_layer, block_x(),
                                                               block_z());
}

int launch_gradient(const GradientArguments& arguments, const Queue& queue) {
  const auto with_panel = [&](auto number, auto width, auto is_aligned) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    const Grid grid = {ceil_div(arguments.columns, kBlockColumns), arguments.plan.split_count,
                       panels_of(arguments.type, arguments.ranks)};
    const auto run = [&](auto layers, auto kernel, int first) {
      return launch(kernel, grid, kThreads, GradientShape<T, kRanks, decltype(layers)::value, true>::kShared,
                    queue, arguments, first);
    };
    const auto run_aligned = [&](auto layers, int first) {
      constexpr int kLayers = decltype(layers)::value;
      return arguments.dropout.p == nullptr
                 ? run(layers, read_x_kernel<T, kRanks, kLayers, Masks::kNone, true>, first)
             : arguments.keep == nullptr
                 ? run(layers, read_x_kernel<T, kRanks, kLayers, Masks::kDrawn, true>, first)
                 : run(layers, read_x_kernel<T, kRanks, kLayers, Masks::kStored, true>, first);
    };
    int error = 0;
    for (int layer = 0; layer < arguments.layers && error == 0;) {
      const int left = arguments.layers - layer;
      if constexpr (!decltype(is_aligned)::value) {
        error = run(Constant<1>{}, read_x_kernel<T, kRanks, 1, Masks::kDrawn, false>, layer++);
      } else if constexpr (kLayersAtOnce<T, kRanks> == 1) {
        error = run_aligned(Constant<1>{}, layer++);
      } else {
        error = left >= 3   ? run_aligned(Constant<3>{}, layer)
                : left == 2 ? run_aligned(Constant<2>{}, layer)
                            : run_aligned(Constant<1>{}, layer);
        layer += left < 3 ? left : 3;
      }
    }
    return error;
  };
  return for_panel(arguments.type, arguments.ranks, arguments.aligned(), with_panel);
}

}  // namespace

int launch_read_x(const GradientArguments& arguments, const Queue& queue) {
  const bool need_gradient = arguments.gradient != nullptr;
  const bool need_dx = arguments.dx.data != nullptr;
  const bool one_panel = arguments.ranks <= widest_panel(arguments.type);
  GradientArguments gradient = arguments;
  if (need_dx && !one_panel) {
    // dx is a sum over several panels of ranks, which no program of the gradient holds
    ExpandArguments dx = {};
    dx.type = arguments.type;
    dx.s = arguments.s;
    dx.layer_stride = arguments.layer_stride;
    dx.layers = arguments.layers;
    dx.adds_up = true;
    dx.add = arguments.add_dx;
    dx.plan = arguments.plan;
    dx.dropout = arguments.dropout;
    dx.output[0] = {arguments.factor, nullptr, arguments.dx, arguments.columns, 0};
    dx.ranks = arguments.ranks;
    const int error = launch_expand(dx, queue);
    if (error != 0) {
      return error;
    }
    gradient.dx.data = nullptr;
  }
  return need_gradient || gradient.dx.data != nullptr ? launch_gradient(gradient, queue) : 0;
}

}  // namespace mlora::cuda
