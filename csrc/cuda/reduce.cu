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

// One program for 256 columns of one rank of one adapter in one layer.
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_gradients_kernel(ReduceArguments arguments, T* gradient) {
  const int layer = block_z() / arguments.factor.adapters;
  const int adapter = block_z() % arguments.factor.adapters;
  const Group group = arguments.groups[adapter];
  const FactorRow factor = row_of(arguments.factor, layer, adapter);
  const int rank = block_y();
  const int column = block_x() * kReduceThreads + thread_index();
  if (group.slot_count == 0 || rank >= factor.rank || column >= arguments.columns) {
    return;
  }
  float sum = 0.0f;
  for (int i = 0; i < group.slot_count; ++i) {
    const int64_t slot = int64_t{layer} * arguments.slots + group.slot_begin + i;
    sum += arguments.partial[(slot * arguments.ranks + rank) * arguments.columns + column];
  }
  T& out = gradient[factor.grad_offset + rank * factor.grad_rank_stride + column * factor.grad_column_stride];
  from_float(arguments.add ? to_float(out) + sum : sum, out);
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

int launch_reduce_gradients(const ReduceArguments& arguments, const Queue& queue) {
  return for_pointer(arguments.factor.type, arguments.gradient, [&](auto* data) {
    using T = std::remove_pointer_t<decltype(data)>;
    const Grid grid = {ceil_div(arguments.columns, kReduceThreads), arguments.ranks,
                       int64_t{arguments.layers} * arguments.factor.adapters};
    return launch(reduce_gradients_kernel<T>, grid, kReduceThreads, 0, queue.stream, queue.device, arguments,
                  data);
  });
}

}  // namespace mlora::cuda
