// ds = scaling dy B and dB = dy^T s of every layer in one launch: the second reader of a row finds it in the
// L2 cache. On sm_90 read_dy_once.cu makes both in one pass, in 16 bits.
#include "cuda/dispatch.cuh"
#include "cuda/gradient.cuh"
#include "cuda/read_dy_once.h"
#include "cuda/shrink.cuh"

namespace mlora::cuda {
namespace {

// Blocks of a multiprocessor whose registers suffice without spilling.
template <typename T, int kRanks>
constexpr int kBlocks = kRanks * static_cast<int>(sizeof(T)) > 128 ? 1 : 2;

// The programs of a layer are, split by split, those of tiles and then those of column blocks, so that both
// meet the rows at about the same time.
struct SplitPrograms {
  int parts;          // of a tile's sum; 0: no programs of tiles
  int column_blocks;  // 0: no programs of column blocks
  int panels;

  MLORA_HD int each() const { return (kSplitTiles * parts + column_blocks) * panels; }
};

MLORA_HD SplitPrograms programs_of(const ReadDyArguments& arguments, int layer) {
  return {arguments.need_ds ? arguments.ds[layer].parts : 0,
          arguments.need_gradient ? ceil_div(arguments.gradient[layer].columns, kBlockColumns) : 0,
          panels_of(arguments.gradient[layer].type, arguments.gradient[layer].ranks)};
}

template <typename T, int kRanks, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kRanks>)
    read_dy_kernel(const __grid_constant__ ReadDyArguments arguments) {
  int layer = 0;
  while (arguments.first_program[layer + 1] <= block_x()) {
    ++layer;
  }
  const SplitPrograms programs = programs_of(arguments, layer);
  const GradientArguments& gradient = arguments.gradient[layer];
  const int index = block_x() - arguments.first_program[layer];
  const int split_index = index / programs.each();
  const int place = index % programs.each() / programs.panels;
  const int panel = index % programs.panels;
  const int of_tiles = kSplitTiles * programs.parts;
  if (place < of_tiles) {
    const Split split = read(gradient.plan.splits + split_index);
    const int tile = split.tile_begin + place / programs.parts;
    if (tile < split.tile_end) {
      shrink_tile<T, kRanks, false, kAligned>(arguments.ds[layer], tile, 0, place % programs.parts, panel);
    }
  } else {
    gradient_split<T, kRanks, 1, false, Masks::kNone, kAligned>(gradient, split_index, 0, place - of_tiles,
                                                                panel);
  }
}

}  // namespace

int launch_read_dy(ReadDyArguments arguments, const Queue& queue) {
  if (reads_dy_once(arguments, queue)) {
    return launch_read_dy_once(arguments, queue);
  }
  const GradientArguments& any = arguments.gradient[0];
  int64_t programs = 0;
  bool aligned = true;
  for (int layer = 0; layer < arguments.layers; ++layer) {
    programs += int64_t{any.plan.split_count} * programs_of(arguments, layer).each();
    aligned = aligned && arguments.gradient[layer].aligned();
    arguments.first_program[layer + 1] = static_cast<int>(programs < INT32_MAX ? programs : INT32_MAX);
  }
  return for_panel(any.type, any.ranks, aligned, [&](auto number, auto width, auto is_aligned) {
    using T = decltype(number);
    constexpr int kRanks = decltype(width)::value;
    return launch(read_dy_kernel<T, kRanks, decltype(is_aligned)::value>, Grid{programs}, kThreads,
                  larger(kShrinkShared<T, kRanks>, kGradientShared<T, kRanks, 1, false>), queue, arguments);
  });
}

}  // namespace mlora::cuda
