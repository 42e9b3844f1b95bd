// dA = ds^T drop(x) and dx = drop'(ds A) in one launch, under one mask.
#include "cuda/dispatch.cuh"
#include "cuda/gradient.cuh"

namespace mlora::cuda {
namespace {

// Blocks of a multiprocessor whose registers suffice without spilling.
template <typename T, int kRanks>
constexpr int kBlocks = sizeof(T) == 4 && kRanks > 32 ? 1 : 2;

template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kRanks>) read_x_kernel(GradientArguments arguments) {
  gradient_program<T, kRanks, true>(arguments, block_y(), block_x(), block_z());
}

int launch_gradient(const GradientArguments& arguments, const Queue& queue) {
  return for_panel(arguments.type, arguments.ranks, [&](auto number, auto width) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    const Grid grid = {ceil_div(arguments.columns, kBlockColumns), arguments.split_count,
                       ceil_div(arguments.ranks, kRanks)};
    return launch(read_x_kernel<T, kRanks>, grid, kThreads, GradientShape<T, kRanks, true>::kShared,
                  queue.stream, queue.device, arguments);
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
    const ExpandArguments dx = {arguments.type,       arguments.s,     arguments.factor,  arguments.tiles,
                                arguments.tile_count, nullptr,         arguments.dropout, arguments.dx,
                                arguments.columns,    arguments.ranks, arguments.add_dx};
    const int error = launch_expand(dx, queue);
    if (error != 0) {
      return error;
    }
    gradient.dx.data = nullptr;
  }
  return need_gradient ? launch_gradient(gradient, queue) : 0;
}

}  // namespace mlora::cuda
