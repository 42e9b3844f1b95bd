// Fills pages of factors for the frozen product: the factors of each adapter in the dtype of rows, with zeros
// up to whole blocks of 16 ranks. A program has one block of one adapter.
#include "cuda/dispatch.cuh"
#include "cuda/factor_tile.cuh"
#include "cuda/hopper_product.h"

namespace mlora::cuda {
namespace {

constexpr int kPageRanks = 16;
constexpr int kPageColumns = 128;

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) page_kernel(const __grid_constant__ PageArguments arguments) {
  using Stage = SharedTile<T, kPageColumns>;
  using Own = OwnChunks<T, kPageColumns>;
  const int adapter = block_y();
  const int layer = block_z();
  const int blocks = arguments.pitch / kPageRanks;
  const int first = block_x() % blocks * kPageRanks;
  const int column = block_x() / blocks * kPageColumns;
  const PageOut& out = arguments.out[layer];
  const FactorRow& row = row_of(arguments.factor, layer, adapter);
  if (first >= row.rank || column >= out.columns) {
    return;
  }
  const Stage tile = {reinterpret_cast<T*>(shared_memory())};
  const Panel<T> panel(arguments.factor, row, first, kPageRanks);
  FactorLoad<T, kPageRanks, kPageColumns, false, kAligned>{}.begin(tile, panel, column, out.columns - column);
  commit_copies();
  wait_copies<0>();
  synchronize();
  const int chunk = column + Own::chunk() * Chunk<T>::kCount;
  if (chunk < out.columns) {
    T* to = static_cast<T*>(out.data) +
            (int64_t{adapter} * arguments.pitch + first + Own::row(0)) * out.columns + chunk;
    write(reinterpret_cast<Chunk<T>*>(to),
          *reinterpret_cast<const Chunk<T>*>(tile.chunk(Own::row(0), Own::chunk())));
  }
}

}  // namespace

int launch_pages(const PageArguments& arguments, const Queue& queue) {
  int columns = 0;
  for (int layer = 0; layer < arguments.layers; ++layer) {
    columns = larger(columns, arguments.out[layer].columns);
  }
  const Grid grid = {int64_t{ceil_div(columns, kPageColumns)} * (arguments.pitch / kPageRanks),
                     arguments.factor.adapters, arguments.layers};
  const auto with = [&](auto number) {
    using T = decltype(number);
    const int shared = SharedTile<T, kPageColumns>::bytes(kPageRanks);
    return arguments.factor.aligned ? launch(page_kernel<T, true>, grid, kThreads, shared, queue, arguments)
                                    : launch(page_kernel<T, false>, grid, kThreads, shared, queue, arguments);
  };
  return arguments.type == Scalar::kHalf ? with(Half{}) : with(BFloat16{});
}

}  // namespace mlora::cuda
