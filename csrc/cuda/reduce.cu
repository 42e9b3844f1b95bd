// Partial sums, added in their order.
#include "cuda/kernels.h"
#include "cuda/primitives.cuh"

namespace mlora::cuda {
namespace {

constexpr int kReduceThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_rows_kernel(const float* partial, int splits, int64_t numbers, T* out) {
  const int64_t place = int64_t{block_x()} * kReduceThreads + thread_index();
  if (place >= numbers) {
    return;
  }
  float sum = 0.0f;
  for (int i = 0; i < splits; ++i) {
    sum += partial[i * numbers + place];
  }
  from_float(sum, out[place]);
}

// One program for 256 columns of one rank of one adapter.
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_gradients_kernel(const float* partial, const FactorRow* rows, const Group* groups, int ranks,
                            int columns, T* gradient, bool add) {
  const Group group = groups[block_z()];
  const FactorRow factor = rows[block_z()];
  const int rank = block_y();
  const int column = block_x() * kReduceThreads + thread_index();
  if (group.slot_count == 0 || rank >= factor.rank || column >= columns) {
    return;
  }
  float sum = 0.0f;
  for (int i = 0; i < group.slot_count; ++i) {
    const int64_t slot = group.slot_begin + i;
    sum += partial[(slot * ranks + rank) * columns + column];
  }
  T& out = gradient[factor.grad_offset + rank * factor.grad_rank_stride + column * factor.grad_column_stride];
  from_float(add ? to_float(out) + sum : sum, out);
}

// f(pointer of the dtype)
template <typename Function>
int for_pointer(Scalar type, void* data, Function&& f) {
  return type == Scalar::kFloat  ? f(static_cast<float*>(data))
         : type == Scalar::kHalf ? f(static_cast<Half*>(data))
                                 : f(static_cast<BFloat16*>(data));
}

}  // namespace

int launch_reduce_rows(const float* partial, int splits, int64_t numbers, Scalar type, void* out,
                       const Queue& queue) {
  return for_pointer(type, out, [&](auto* data) {
    using T = std::remove_pointer_t<decltype(data)>;
    const Grid grid = {ceil_div(numbers, kReduceThreads)};
    return launch(reduce_rows_kernel<T>, grid, kReduceThreads, 0, queue.stream, queue.device, partial, splits,
                  numbers, data);
  });
}

int launch_reduce_gradients(const float* partial, const FactorTable& factor, const Group* groups,
                            int adapters, int ranks, int columns, void* gradient, bool add,
                            const Queue& queue) {
  return for_pointer(factor.type, gradient, [&](auto* data) {
    using T = std::remove_pointer_t<decltype(data)>;
    const Grid grid = {ceil_div(columns, kReduceThreads), ranks, adapters};
    return launch(reduce_gradients_kernel<T>, grid, kReduceThreads, 0, queue.stream, queue.device, partial,
                  factor.rows, groups, ranks, columns, data, add);
  });
}

}  // namespace mlora::cuda
