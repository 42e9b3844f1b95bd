// The operator of docs/dev/gpu.md: one call per direction, for one layer or several that share x. It makes
// the memory, launches the kernels and calls the frozen products.
//
// Letters: T rows, D = d_in, O = d_out, N adapters, R largest rank, L layers that share x.
#include "cuda/beside.h"
#include "cuda/own_products.h"

#ifdef MLORA_EMULATE
#define MLORA_DEVICE_KEY CPU
#else
#define MLORA_DEVICE_KEY CUDA
#endif

namespace mlora::cuda {
namespace {

// [K + M + N, 4] int32: tiles, splits and groups, one below the other. For own products, the most parts and
// `starts` follow.
Tensor plan(const Tensor& segments, int64_t rows, int64_t adapters, int64_t tiles, int64_t splits, bool own) {
  check_table(segments, "segments", 4, ScalarType::Long);
  MLORA_CHECK(rows >= 0 && rows <= INT32_MAX, "rows: expected 0 to ", INT32_MAX, ", got ", rows);
  const Queue queue = queue_of(segments);
  own = own && has_product(queue);
  const int64_t parts = own ? most_parts(rows, segments.size(0)) : 0;
  const int64_t more = own ? parts + start_rows(rows) : 0;
  Tensor made = empty_like_device(segments, {tiles + splits + adapters + more, 4}, ScalarType::Int);
  const Batch batch = {static_cast<const Segment*>(segments.const_data_ptr()),
                       static_cast<int32_t>(segments.size(0)), static_cast<int32_t>(adapters), rows};
  Tile* first = static_cast<Tile*>(made.mutable_data_ptr());
  Split* first_split = reinterpret_cast<Split*>(first + tiles);
  const PlanTables tables = {first, static_cast<int32_t>(tiles), first_split, static_cast<int32_t>(splits),
                             reinterpret_cast<Group*>(first_split + splits)};
  check_launch(queue, launch_plan(batch, tables, queue), "plan");
  if (own) {
    Tile* first_part = first + tiles + splits + adapters;
    const PartTables part_tables = {reinterpret_cast<int32_t*>(first_part + parts), first_part,
                                    static_cast<int32_t>(parts)};
    check_launch(queue, launch_parts(batch, part_tables, queue), "parts");
  }
  return made;
}

bool has_own_products(const Tensor& tensor) { return has_product(queue_of(tensor)); }

int64_t capture(const Tensor& tensor) { return static_cast<int64_t>(capture_of(queue_of(tensor))); }

// W [O, D], of any strides.
void check_weight(const Tensor& weight, int64_t rows, int64_t columns, ScalarType type) {
  MLORA_CHECK(on_device(weight) && weight.dim() == 2 && weight.size(0) == rows && weight.size(1) == columns &&
                  weight.scalar_type() == type,
              "weights: expected ", dtype_name(type), " of shape [", rows, ", ", columns,
              "] on the device, got ", dtype_name(weight.scalar_type()), " of shape ", shape_of(weight));
}

void* checked_gradient(const Tensor& gradient, const FactorTable& factor, const char* name) {
  MLORA_CHECK(on_device(gradient) && is_scalar(gradient.scalar_type()) &&
                  scalar_of(gradient.scalar_type()) == factor.type,
              name, ": expected the adapters' dtype on the device, got ", dtype_name(gradient.scalar_type()));
  return gradient.mutable_data_ptr();
}

void* part(const Tensor& tensor, int64_t numbers) {
  return static_cast<char*>(tensor.mutable_data_ptr()) +
         numbers * static_cast<int64_t>(tensor.element_size());
}

// y of each layer, s [L, T, R, padded], and the keep bits that `save_masks` asks for, or none. Without
// weights `products` hold x W^T + bias, and the low-rank parts are added to them. A bias without numbers is
// none. `group`: of our own frozen products (ProductArguments); 0: the vendor's.
std::tuple<Tensors, Tensor, OptionalTensor> forward(
    const Tensor& x, const Tensors& weights, const Tensors& biases, Tensors products, const Tensor& a,
    const Tensor& a_table, const Tensor& b, const Tensor& b_table, bool a_aligned, bool b_aligned,
    int64_t max_rank, const Tensor& made, int64_t tiles, int64_t splits, const Tensor& scaling,
    const OptionalTensor& dropout_p, const OptionalTensor& dropout_rng, const OptionalTensor& layers,
    bool save_masks, int64_t group) {
  const bool multiplies = !weights.empty();
  const size_t count = (multiplies ? weights : products).size();
  const Call call(x, count, a, a_table, b, b_table, a_aligned, b_aligned, max_rank, made, tiles, splits,
                  scaling, {dropout_p, dropout_rng, layers});
  MLORA_CHECK(biases.empty() || biases.size() == count, "biases: expected none or one of each layer");
  const bool saves = save_masks && dropout_p.has_value();
  Tensor s = empty_like_device(x, {call.layers, call.rows, call.ranks}, call.dtype);
  OptionalTensor keep;
  if (saves) {
    keep =
        empty_like_device(x, {call.layers, call.rows, ceil_div(call.columns, kWordColumns)}, ScalarType::Int);
  }
  ShrinkArguments shrink = call.shrink(x, call.a, s.mutable_data_ptr());
  shrink.layers = static_cast<int>(call.layers);
  shrink.drops = dropout_p.has_value();
  shrink.keep = saves ? static_cast<uint32_t*>(keep->mutable_data_ptr()) : nullptr;
  ExpandArguments expand = {};
  expand.type = call.type;
  expand.s = {s.const_data_ptr(), call.ranks, is_aligned(s.const_data_ptr(), call.ranks, s.element_size())};
  expand.layer_stride = call.row_numbers();
  expand.layers = shrink.layers;
  expand.add = !multiplies;
  expand.plan = call.plan;
  expand.ranks = shrink.ranks;
  OwnProducts own(call, call.b, true, multiplies ? group : 0);
  for (size_t i = 0; i < count; ++i) {
    if (multiplies) {
      const int64_t columns = weights[i].size(0);
      check_weight(weights[i], columns, call.columns, call.dtype);
      products.push_back(empty_like_device(x, {call.rows, columns}, call.dtype));
    }
    const Tensor& y = products[i];
    check_rows(y, "products", call.rows, y.size(1), call.dtype);
    const bool biased = multiplies && !biases.empty() && biases[i].numel() > 0;
    if (biased) {
      check_dense(biases[i], "bias", 1, call.dtype);
      MLORA_CHECK(biases[i].size(0) == y.size(1), "bias: expected ", y.size(1), " numbers, got ",
                  biases[i].size(0));
    }
    expand.output[i] = {call.b_of(i), biased ? biases[i].const_data_ptr() : nullptr, out_rows_of(y),
                        static_cast<int>(y.size(1)), 0};
    if (own.serve()) {
      own.add(x, weights[i], y, part(s, static_cast<int64_t>(i) * call.row_numbers()), expand.output[i].bias);
    }
  }
  Partials partials(call);
  partials.add_shrink(shrink, call.layers);
  partials.allocate(x);
  check_launch(call.queue, launch_shrink(shrink, call.queue), "shrink");
  if (own.serve()) {
    own.fill_pages(x);
    own.launch();
  } else {
    check_launch(call.queue, launch_expand(expand, call.queue), "expand");
    for (size_t i = 0; i < weights.size(); ++i) {
      add_product(products[i], x, transposed(weights[i]));
    }
  }
  return {multiplies ? products : Tensors{}, s, keep};
}

// dx, or an empty tensor; gradients go to where the tables say, from `da` and `db` on, or are added there.
// Without weights `product` holds the sum of dy W, and the low-rank part is added to it. `group` as in
// forward; `left`: multiprocessors on which dA is made beside own products; 0: before them. `once`: dy is
// read in one pass, where that is served.
Tensor backward(const Tensors& dys, const Tensor& x, const Tensors& weights, OptionalTensor product,
                const Tensor& a, const Tensor& a_table, OptionalTensor da, const Tensor& b,
                const Tensor& b_table, OptionalTensor db, bool a_aligned, bool b_aligned, int64_t max_rank,
                const Tensor& s, const OptionalTensor& keep, const Tensor& made, int64_t tiles,
                int64_t splits, int64_t slots, const Tensor& scaling, const OptionalTensor& dropout_p,
                const OptionalTensor& dropout_rng, const OptionalTensor& layers, bool need_dx, bool add,
                int64_t group, int64_t left, bool once) {
  const Call call(x, dys.size(), a, a_table, b, b_table, a_aligned, b_aligned, max_rank, made, tiles, splits,
                  scaling, {dropout_p, dropout_rng, layers});
  check_dense(s, "s", 3, call.dtype);
  MLORA_CHECK(s.size(0) == call.layers && s.size(1) == call.rows && s.size(2) == call.ranks, "s: expected [",
              call.layers, ", ", call.rows, ", ", call.ranks, "], got ", shape_of(s));
  const bool need_ds = need_dx || da.has_value();
  Tensor ds = empty_like_device(x, {need_ds ? call.layers : 0, call.rows, call.ranks}, call.dtype);
  const bool multiplies = need_dx && !product;
  Tensor dx = product ? *product : empty_like_device(x, {need_dx ? call.rows : 0, call.columns}, call.dtype);
  Partials partials(call);
  ReadDyArguments read_dy = {};
  read_dy.layers = static_cast<int>(call.layers);
  read_dy.need_ds = need_ds;
  read_dy.need_gradient = db.has_value();
  for (size_t i = 0; i < dys.size(); ++i) {
    const Tensor& dy = dys[i];
    check_rows(dy, "dy", call.rows, dy.dim() == 2 ? dy.size(1) : 0, call.dtype);
    const int64_t first = static_cast<int64_t>(i) * call.row_numbers();
    GradientArguments& gradient = read_dy.gradient[i];
    gradient = call.gradient(dy, part(s, first), call.b_of(i), 1, slots);
    if (db) {
      gradient.gradient = checked_gradient(*db, call.b, "db");
      gradient.add = add;
      partials.add_gradient(gradient.partial, dy.size(1), 1, slots);
    }
    if (need_ds) {
      read_dy.ds[i] = call.shrink(dy, call.b_of(i), part(ds, first));
      read_dy.ds[i].dropout.layers += call.dropout.layers == nullptr ? 0 : i;
    }
  }
  read_dy.once = once;
  const bool clusters = reads_dy_once(read_dy, call.queue);
  for (size_t i = 0; need_ds && i < dys.size(); ++i) {
    clusters ? partials.add_clusters(read_dy.ds[i]) : partials.add_shrink(read_dy.ds[i], 1);
  }
  GradientArguments read_x = call.gradient(x, ds.const_data_ptr(), call.a, call.layers, slots);
  read_x.dropout = call.dropout;
  if (da) {
    read_x.gradient = checked_gradient(*da, call.a, "da");
    read_x.add = add;
    partials.add_gradient(read_x.partial, call.columns, call.layers, slots);
  }
  if (keep) {
    check_dense(*keep, "keep", 3, ScalarType::Int);
    MLORA_CHECK(keep->size(0) == call.layers && keep->size(1) == call.rows &&
                    keep->size(2) == ceil_div(call.columns, kWordColumns),
                "keep: expected the bits of forward, got ", shape_of(*keep));
    read_x.keep = static_cast<const uint32_t*>(keep->const_data_ptr());
  }
  MLORA_CHECK(!multiplies || weights.size() == dys.size(), "weights: expected one of each layer, got ",
              weights.size());
  OwnProducts own(call, call.a, false, multiplies ? group : 0, read_x.keep);
  for (size_t i = 0; multiplies && i < dys.size(); ++i) {
    check_weight(weights[i], dys[i].size(1), call.columns, call.dtype);
    if (own.serve()) {
      own.add(dys[i], weights[i], dx, part(ds, static_cast<int64_t>(i) * call.row_numbers()), nullptr);
    }
  }
  if (need_dx) {
    check_rows(dx, "product", call.rows, call.columns, call.dtype);
    read_x.dx = own.serve() ? OutRows{} : out_rows_of(dx);
    read_x.add_dx = !multiplies;
  }
  partials.allocate(x);
  if (need_ds || db) {
    check_launch(call.queue, launch_read_dy(read_dy, call.queue), "read_dy");
  }
  const bool reads_x = da || read_x.dx.data != nullptr;
  if (own.serve()) {
    own.fill_pages(x);
  }
  if (own.serve() && reads_x && left > 0 && capture_of(call.queue) == 0) {
    Queue other = {};
    check_launch(call.queue, begin_beside(call.queue, other), "begin_beside");
    own.launch(left);
    const int error = launch_read_x(read_x, other);
    check_launch(call.queue, end_beside(call.queue, other), "end_beside");
    check_launch(call.queue, error, "read_x");
    return dx;
  }
  if (reads_x) {
    check_launch(call.queue, launch_read_x(read_x, call.queue), "read_x");
  }
  if (own.serve()) {
    own.launch();
  } else {
    for (size_t i = 0; multiplies && i < dys.size(); ++i) {
      add_product(dx, dys[i], weights[i]);
    }
  }
  return dx;
}

}  // namespace
}  // namespace mlora::cuda

#define MLORA_LIBRARY_OF(key) STABLE_TORCH_LIBRARY_IMPL(mlora_ext, key, library)
#ifndef MLORA_EMULATE
STABLE_TORCH_LIBRARY_IMPL(mlora_ext, CompositeExplicitAutograd, library) {
  library.impl("cuda_driver_refusal", TORCH_BOX(&mlora::cuda::driver_refusal));
}
#endif

MLORA_LIBRARY_OF(MLORA_DEVICE_KEY) {
  library.impl("cuda_plan", TORCH_BOX(&mlora::cuda::plan));
  library.impl("cuda_has_own_products", TORCH_BOX(&mlora::cuda::has_own_products));
  library.impl("cuda_capture", TORCH_BOX(&mlora::cuda::capture));
  library.impl("cuda_forward", TORCH_BOX(&mlora::cuda::forward));
  library.impl("cuda_backward", TORCH_BOX(&mlora::cuda::backward));
}
