// Kernels and launcher of the frozen product with the low-rank part inside; hopper_product.cuh says how it is
// made.
#include "cuda/dispatch.cuh"
#include "cuda/hopper_product.cuh"

namespace mlora::cuda {

#if defined(MLORA_EMULATE) || defined(MLORA_SM90A)
namespace {

template <typename T, bool kForward, Masks kMasks, int kCluster>
__global__ void __launch_bounds__(ProductShape::kThreads, 1)
    product_kernel(const __grid_constant__ ProductMaps maps, const __grid_constant__ ProductTables tables) {
#if defined(MLORA_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ProductBlock<T, kForward, kMasks, kCluster>(maps, tables).run();
#endif
}

bool is_suited(const ProductArguments& arguments) {
  const bool alone = arguments.parts.starts == nullptr;
  const int columns = arguments.forward ? arguments.d_out : arguments.d_in;
  const int depth = arguments.forward ? arguments.d_in : arguments.d_out;
  const bool apart = arguments.rows.stride >= depth && arguments.weight.stride >= arguments.d_in &&
                     arguments.out.stride >= columns;
  return arguments.type != Scalar::kFloat && apart && arguments.rows.aligned && arguments.weight.aligned &&
         arguments.rows_total <= INT32_MAX && arguments.out.aligned &&
         reinterpret_cast<uintptr_t>(arguments.bias) % 16 == 0 &&
         (alone || (arguments.s.aligned && arguments.factor.rows.aligned && arguments.factor.adapters > 0)) &&
         arguments.d_in > 0 && arguments.d_out > 0 && (arguments.cluster == 1 || arguments.cluster == 2) &&
         arguments.group > 0 && arguments.left >= 0;
}

int make_maps(ProductMaps& maps, const ProductArguments& arguments) {
  using Shape = ProductShape;
  const int columns = arguments.forward ? arguments.d_out : arguments.d_in;
  const int depth = arguments.forward ? arguments.d_in : arguments.d_out;
  const auto make = [&](TensorMap& map, const Rows& matrix, int64_t rows, int64_t width, int box_rows,
                        int box_columns) {
    return make_map(map, arguments.type, matrix.data, rows, width, matrix.stride, box_rows, box_columns);
  };
  const OutRows& out = arguments.out;
  const FactorPage& page = arguments.factor;
  int error = make(maps.rows, arguments.rows, arguments.rows_total, depth, Shape::kRows, Shape::kDepth);
  if (error == 0) {
    error = make(maps.weight, arguments.weight, arguments.d_out, arguments.d_in, 64, 64);
  }
  if (error == 0) {
    error = make_map(maps.out, arguments.type, out.data, arguments.rows_total, columns, out.stride,
                     Shape::kWarpRows, 64);
  }
  if (error == 0 && arguments.parts.starts != nullptr) {
    error = make(maps.s, arguments.s, arguments.rows_total, arguments.ranks, Shape::kRows, Shape::kDepth);
    if (error == 0) {
      error = make(maps.factor, page.rows, int64_t{page.adapters} * page.pitch, columns, Shape::kDepth, 32);
    }
  }
  return error;
}

// As many clusters as there are tiles, or as fit: two neighbouring multiprocessors always take a cluster.
template <int kCluster>
int64_t blocks_of(const ProductTables& tables, int multiprocessors) {
  const int64_t pairs = ceil_div(ceil_div(tables.rows, ProductShape::kRows), kCluster);
  const int64_t tiles = pairs * ceil_div(tables.columns, ProductShape::kColumns);
  const int64_t fitting = multiprocessors / kCluster < 1 ? 1 : multiprocessors / kCluster;
  return kCluster * (tiles < fitting ? tiles : fitting);
}

}  // namespace

bool has_product(const Queue& queue) {
  return is_hopper(queue) && most_shared_bytes(queue) >= ProductShape::kShared;
}

bool serves_product(const ProductArguments& arguments, const Queue& queue) {
  return has_product(queue) && is_suited(arguments);
}

int launch_product(const ProductArguments& arguments, const Queue& queue) {
  if (!serves_product(arguments, queue)) {
    return kNotSupported;
  }
  if (arguments.rows_total == 0) {
    return 0;
  }
  const int used = multiprocessors(queue) - arguments.left;
  ProductMaps maps = {};
  if (const int error = make_maps(maps, arguments); error != 0) {
    return error;
  }
  const ProductTables tables = {arguments.parts,
                                arguments.factor.factors,
                                arguments.factor.pitch,
                                arguments.bias,
                                arguments.keep,
                                arguments.dropout,
                                static_cast<int>(arguments.rows_total),
                                arguments.forward ? arguments.d_out : arguments.d_in,
                                arguments.forward ? arguments.d_in : arguments.d_out,
                                arguments.group,
                                arguments.add};
  const auto run = [&](auto cluster, auto kernel) {
    constexpr int kCluster = decltype(cluster)::value;
    const Grid grid = {blocks_of<kCluster>(tables, used), 1, 1, kCluster};
    return launch(kernel, grid, ProductShape::kThreads, ProductShape::kShared, queue, maps, tables);
  };
  const auto with_cluster = [&](auto number, auto cluster) {
    using T = decltype(number);
    constexpr int kCluster = decltype(cluster)::value;
    const bool drops = arguments.parts.starts != nullptr && arguments.dropout.p != nullptr;
    return arguments.forward           ? run(cluster, product_kernel<T, true, Masks::kNone, kCluster>)
           : !drops                    ? run(cluster, product_kernel<T, false, Masks::kNone, kCluster>)
           : arguments.keep == nullptr ? run(cluster, product_kernel<T, false, Masks::kDrawn, kCluster>)
                                       : run(cluster, product_kernel<T, false, Masks::kStored, kCluster>);
  };
  const auto with_number = [&](auto number) {
    return arguments.cluster == 1 ? with_cluster(number, Constant<1>{}) : with_cluster(number, Constant<2>{});
  };
  return arguments.type == Scalar::kHalf ? with_number(Half{}) : with_number(BFloat16{});
}

#else

bool has_product(const Queue&) { return false; }
bool serves_product(const ProductArguments&, const Queue&) { return false; }
int launch_product(const ProductArguments&, const Queue&) { return kNotSupported; }

#endif

}  // namespace mlora::cuda
