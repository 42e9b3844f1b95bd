// dA = ds^T drop(x) and dx = drop'(ds A) in one launch, under one mask.
#include "cuda/dispatch.cuh"
#include "cuda/gradient.cuh"

namespace mlora::cuda {
namespace {

// Blocks of a multiprocessor whose registers suffice without spilling.
template <typename T, int kRanks>
constexpr int kBlocks = sizeof(T) == 4 && kRanks > 32 ? 1 : 2;

// The widest panel leaves no registers for a loop over layers: they are launches one after the other.
template <int kRanks>
constexpr bool kLoops = kRanks <= 64;

// A program takes the layers one after the other: the later ones find its rows in the cache.
template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kRanks>)
    read_x_kernel(GradientArguments arguments, int only_layer) {
  if constexpr (kLoops<kRanks>) {
#pragma unroll 1
    for (int layer = 0; layer < arguments.layers; ++layer) {
      if (layer > 0) {
        synchronize();  // dx is read again, and shared memory is free
      }
      gradient_program<T, kRanks, true>(arguments, block_y(), layer, block_x(), block_z());
    }
  } else {
    gradient_program<T, kRanks, true>(arguments, block_y(), only_layer, block_x(), block_z());
  }
}

int launch_gradient(const GradientArguments& arguments, const Queue& queue) {
  return for_panel(arguments.type, arguments.ranks, [&](auto number, auto width) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    const Grid grid = {ceil_div(arguments.columns, kBlockColumns), arguments.split_count,
                       ceil_div(arguments.ranks, kRanks)};
    int error = 0;
    for (int layer = 0; layer < (kLoops<kRanks> ? 1 : arguments.layers) && error == 0; ++layer) {
      error = launch(read_x_kernel<T, kRanks>, grid, kThreads, GradientShape<T, kRanks, true>::kShared,
                     queue.stream, queue.device, arguments, layer);
    }
    return error;
  });
}

}  // namespace

int launch_read_x(const GradientArguments& arguments, const Queue& queue) {
  const bool need_gradient = arguments.gradient != nullptr;
  const bool need_dx = arguments.dx.data != nullptr;
  const bool one_panel = arguments.ranks <= widest_panel(arguments.type);
  GradientArguments gradient = arguments;
  if (need_dx && !(need_gradient && one_panel)) {
    // dx alone, or a sum over several panels of ranks, which no program of the gradient holds
    const ExpandArguments dx = {arguments.type,    arguments.s,     arguments.layer_stride, arguments.layers,
                                arguments.factor,  arguments.tiles, arguments.tile_count,   nullptr,
                                arguments.dropout, arguments.dx,    arguments.columns,      arguments.ranks};
    const int error = launch_expand(dx, queue);
    if (error != 0) {
      return error;
    }
    gradient.dx.data = nullptr;
  }
  return need_gradient ? launch_gradient(gradient, queue) : 0;
}

}  // namespace mlora::cuda
