// ds = scaling dy B and dB = dy^T s in one launch: the second reader of a row finds it in the L2 cache.
#include "cuda/dispatch.cuh"
#include "cuda/gradient.cuh"
#include "cuda/shrink.cuh"

namespace mlora::cuda {
namespace {

// Blocks of a multiprocessor whose registers suffice without spilling.
template <typename T, int kRanks>
constexpr int kBlocks = kRanks * static_cast<int>(sizeof(T)) > 128 ? 1 : 2;

template <typename T, int kRanks>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kRanks>)
    read_dy_kernel(ShrinkArguments ds, GradientArguments gradient, SplitPrograms programs) {
  const SplitProgram program = program_of(programs, block_x());
  if (program.of_tile) {
    const Split split = gradient.splits[program.split];
    if (split.tile_begin + program.tile < split.tile_end) {
      shrink_program<T, kRanks, false>(ds, split.tile_begin + program.tile, 0, program.column, program.panel);
    }
  } else {
    gradient_program<T, kRanks, false>(gradient, program.split, 0, program.column, program.panel);
  }
}

}  // namespace

int launch_read_dy(const ShrinkArguments& ds, bool need_ds, const GradientArguments& gradient,
                   bool need_gradient, const Queue& queue) {
  return for_panel(gradient.type, gradient.ranks, [&](auto number, auto width) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    constexpr int kShrinkBytes = ShrinkShape<T, kRanks>::kShared;
    constexpr int kGradientBytes = GradientShape<T, kRanks, false>::kShared;
    const SplitPrograms programs = {need_ds ? ceil_div(ds.columns, kColumnSplit) : 0,
                                    need_gradient ? ceil_div(gradient.columns, kBlockColumns) : 0,
                                    ceil_div(gradient.ranks, kRanks)};
    const Grid grid = {int64_t{gradient.split_count} * programs_per_split(programs)};
    return launch(read_dy_kernel<T, kRanks>, grid, kThreads,
                  kShrinkBytes > kGradientBytes ? kShrinkBytes : kGradientBytes, queue.stream, queue.device,
                  ds, gradient, programs);
  });
}

}  // namespace mlora::cuda
