// The operator of docs/gpu.md: one call per direction, for one layer or several that share x. It makes the
// memory, launches the kernels and calls the frozen products.
//
// Letters: T rows, D = d_in, O = d_out, N adapters, R largest rank, L layers that share x.
#include <sstream>
#include <string>
#include <vector>

#include "cuda/tickets.h"

#ifdef MLORA_EMULATE
#define MLORA_DEVICE_KEY CPU
#else
#define MLORA_DEVICE_KEY CUDA
#endif

namespace mlora::cuda {
namespace {

using Tensors = std::vector<Tensor>;
using OptionalTensor = std::optional<Tensor>;

// [K + M + N, 4] int32: tiles, splits and groups, one below the other.
Tensor plan(const Tensor& segments, int64_t rows, int64_t adapters, int64_t tiles, int64_t splits) {
  check_table(segments, "segments", 4, ScalarType::Long);
  MLORA_CHECK(rows >= 0 && rows <= INT32_MAX, "rows: expected 0 to ", INT32_MAX, ", got ", rows);
  Tensor made = empty_like_device(segments, {tiles + splits + adapters, 4}, ScalarType::Int);
  const Batch batch = {static_cast<const Segment*>(segments.const_data_ptr()),
                       static_cast<int32_t>(segments.size(0)), static_cast<int32_t>(adapters), rows};
  Tile* first = static_cast<Tile*>(made.mutable_data_ptr());
  Split* first_split = reinterpret_cast<Split*>(first + tiles);
  const PlanTables tables = {first, static_cast<int32_t>(tiles), first_split, static_cast<int32_t>(splits),
                             reinterpret_cast<Group*>(first_split + splits)};
  check_launch(launch_plan(batch, tables, queue_of(segments)), "plan");
  return made;
}

int64_t capture(const Tensor& tensor) { return static_cast<int64_t>(capture_of(queue_of(tensor))); }

struct DropoutInputs {
  const OptionalTensor& p;
  const OptionalTensor& rng;
  const OptionalTensor& layers;
};

// What both directions know of a call.
struct Call {
  Queue queue;
  ScalarType dtype;
  Scalar type;
  int64_t rows;
  int64_t columns;  // D
  int64_t layers;
  int64_t adapters;
  int64_t ranks;
  FactorTable a;
  std::vector<FactorTable> b;
  PlanView plan;
  const float* scaling;
  DropoutTables dropout;

  Call(const Tensor& x, const Tensor& a_first, const Tensor& a_table, const Tensors& b_firsts,
       const Tensors& b_tables, bool a_aligned, bool b_aligned, int64_t max_rank, const Tensor& made,
       int64_t tiles, int64_t splits, const Tensor& scale, const DropoutInputs& inputs)
      : queue(queue_of(x)),
        dtype(x.scalar_type()),
        type(scalar_of(x.scalar_type())),
        rows(x.size(0)),
        columns(x.dim() == 2 ? x.size(1) : -1),
        layers(static_cast<int64_t>(b_firsts.size())),
        adapters(scale.numel()),
        ranks(max_rank) {
    MLORA_CHECK(is_scalar(dtype), "x: expected dtype Float, BFloat16 or Half, got ", dtype_name(dtype));
    check_rows(x, "x", rows, columns, dtype);
    MLORA_CHECK(layers >= 1 && layers <= kMostLayers && b_tables.size() == b_firsts.size(),
                "b: expected 1 to ", kMostLayers, " layers and a table of each, got ", layers, " and ",
                b_tables.size());
    MLORA_CHECK(ranks >= 1, "max_rank: expected at least 1, got ", ranks);
    check_dense(scale, "scaling", 1, ScalarType::Float);
    scaling = static_cast<const float*>(scale.const_data_ptr());
    a = factor_of(a_first, a_table, "a_table", layers * adapters, dtype);
    a.adapters = static_cast<int>(adapters);
    a.aligned = a_aligned;
    for (size_t i = 0; i < b_firsts.size(); ++i) {
      b.push_back(factor_of(b_firsts[i], b_tables[i], "b_tables", adapters, dtype));
      b.back().adapters = static_cast<int>(adapters);
      b.back().aligned = b_aligned;
    }
    check_table(made, "plan", 4, ScalarType::Int);
    MLORA_CHECK(tiles >= 0 && splits >= 0 && made.size(0) == tiles + splits + adapters, "plan: expected ",
                tiles, " + ", splits, " + ", adapters, " rows, got ", made.size(0));
    const Tile* first = static_cast<const Tile*>(made.const_data_ptr());
    const Split* first_split = reinterpret_cast<const Split*>(first + tiles);
    plan = {first, static_cast<int32_t>(tiles), first_split, static_cast<int32_t>(splits),
            reinterpret_cast<const Group*>(first_split + splits)};
    set_dropout(inputs);
  }

  int64_t row_numbers() const { return rows * ranks; }

  ShrinkArguments shrink(const Tensor& from, const FactorTable& factor, void* out) const {
    ShrinkArguments arguments = {};
    arguments.type = type;
    arguments.rows = rows_of(from);
    arguments.factor = factor;
    arguments.plan = plan;
    arguments.scaling = scaling;
    arguments.dropout = dropout;
    arguments.out = out;
    arguments.rows_total = rows;
    arguments.layers = 1;
    arguments.columns = static_cast<int>(from.size(1));
    arguments.ranks = static_cast<int>(ranks);
    return arguments;
  }

  // `s` is [L, T, R] of this many layers.
  GradientArguments gradient(const Tensor& from, const void* s, const FactorTable& factor, int64_t of_layers,
                             int64_t slots) const {
    GradientArguments arguments = {};
    arguments.type = type;
    arguments.rows = rows_of(from);
    arguments.s = {s, ranks, is_aligned(s, ranks, static_cast<size_t>(element_size(type)))};
    arguments.layer_stride = row_numbers();
    arguments.layers = static_cast<int>(of_layers);
    arguments.factor = factor;
    arguments.plan = plan;
    arguments.slots = static_cast<int>(slots);
    arguments.rows_total = rows;
    arguments.columns = static_cast<int>(from.size(1));
    arguments.ranks = static_cast<int>(ranks);
    return arguments;
  }

 private:
  void set_dropout(const DropoutInputs& inputs) {
    const auto& [p, rng, indices] = inputs;
    MLORA_CHECK(p.has_value() == rng.has_value() && p.has_value() == indices.has_value(),
                "dropout_p, dropout_rng and layers: give all three or none");
    dropout = {};
    if (p) {
      check_dense(*p, "dropout_p", 1, ScalarType::Float);
      check_table(*rng, "dropout_rng", 2, ScalarType::Long);
      check_dense(*indices, "layers", indices->dim(), ScalarType::Long);
      MLORA_CHECK(p->size(0) == adapters && rng->size(0) == adapters && indices->numel() == layers,
                  "dropout_p, dropout_rng, layers: expected ", adapters, " adapters and ", layers,
                  " layers, got shapes ", shape_of(*p), ", ", shape_of(*rng), ", ", shape_of(*indices));
      dropout = {static_cast<const float*>(p->const_data_ptr()),
                 static_cast<const int64_t*>(rng->const_data_ptr()),
                 static_cast<const int64_t*>(indices->const_data_ptr())};
    }
  }
};

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

// fp32 numbers, and tickets, of which parts are taken one after the other.
class Partials {
 public:
  explicit Partials(const Call& call) : call_(call) {}

  // The sums of a product over `columns` columns, where several programs share it.
  void add_shrink(Partial& partial, int64_t columns, int64_t of_layers) {
    const int64_t splits = ceil_div(columns, kColumnSplit);
    if (splits > 1) {
      add(partial, splits * of_layers * call_.row_numbers(),
          shrink_tickets(call_.type, call_.plan.tile_count, of_layers, call_.ranks));
    }
  }
  void add_gradient(Partial& partial, int64_t columns, int64_t of_layers, int64_t slots) {
    if (slots > 0) {
      add(partial, of_layers * slots * call_.ranks * columns,
          gradient_tickets(call_.type, call_.adapters, of_layers, columns, call_.ranks));
    }
  }
  // Fills what was added. The memory is this object's.
  void allocate(const Tensor& like) {
    if (wanted_.empty()) {
      return;
    }
    sums_ = empty_like_device(like, {numbers_}, ScalarType::Float);
    tickets_memory_ = tickets_of(call_.queue, like, tickets_);
    int* first = static_cast<int*>(tickets_memory_->mutable_data_ptr());
    for (const Wanted& one : wanted_) {
      *one.partial = {static_cast<float*>(sums_->mutable_data_ptr()) + one.number, first + one.ticket};
    }
  }

 private:
  struct Wanted {
    Partial* partial;
    int64_t number;
    int64_t ticket;
  };

  void add(Partial& partial, int64_t numbers, int64_t tickets) {
    wanted_.push_back({&partial, numbers_, tickets_});
    numbers_ += numbers;
    tickets_ += tickets;
  }

  const Call& call_;
  std::vector<Wanted> wanted_;
  int64_t numbers_ = 0;
  int64_t tickets_ = 0;
  OptionalTensor sums_, tickets_memory_;
};

// y of each layer, s [L, T, R], and the keep bits that `save_masks` asks for, or none. Without
// weights `products` hold x W^T + bias, and the low-rank parts are added to them. A bias without numbers is
// none.
std::tuple<Tensors, Tensor, OptionalTensor> forward(
    const Tensor& x, const Tensors& weights, const Tensors& biases, Tensors products, const Tensor& a,
    const Tensor& a_table, const Tensors& b, const Tensors& b_tables, bool a_aligned, bool b_aligned,
    int64_t max_rank, const Tensor& made, int64_t tiles, int64_t splits, const Tensor& scaling,
    const OptionalTensor& dropout_p, const OptionalTensor& dropout_rng, const OptionalTensor& layers,
    bool save_masks) {
  const Call call(x, a, a_table, b, b_tables, a_aligned, b_aligned, max_rank, made, tiles, splits, scaling,
                  {dropout_p, dropout_rng, layers});
  const bool multiplies = !weights.empty();
  MLORA_CHECK(
      (multiplies ? weights : products).size() == b.size() && (biases.empty() || biases.size() == b.size()),
      "weights or products, biases: expected one of each layer");
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
  for (size_t i = 0; i < b.size(); ++i) {
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
    expand.output[i] = {call.b[i], biased ? biases[i].const_data_ptr() : nullptr, out_rows_of(y),
                        static_cast<int>(y.size(1)), 0};
  }
  Partials partials(call);
  partials.add_shrink(shrink.partial, call.columns, call.layers);
  partials.allocate(x);
  check_launch(launch_shrink(shrink, call.queue), "shrink");
  check_launch(launch_expand(expand, call.queue), "expand");
  for (size_t i = 0; i < weights.size(); ++i) {
    add_product(products[i], x, transposed(weights[i]));
  }
  return {multiplies ? products : Tensors{}, s, keep};
}

// dx, or an empty tensor; gradients go to where the tables say, from `da` and `db` on, or are added there.
// Without weights `product` holds the sum of dy W, and the low-rank part is added to it.
Tensor backward(const Tensors& dys, const Tensor& x, const Tensors& weights, OptionalTensor product,
                const Tensor& a, const Tensor& a_table, OptionalTensor da, const Tensors& b,
                const Tensors& b_tables, Tensors db, bool a_aligned, bool b_aligned, int64_t max_rank,
                const Tensor& s, const OptionalTensor& keep, const Tensor& made, int64_t tiles,
                int64_t splits, int64_t slots, const Tensor& scaling, const OptionalTensor& dropout_p,
                const OptionalTensor& dropout_rng, const OptionalTensor& layers, bool need_dx, bool add) {
  const Call call(x, a, a_table, b, b_tables, a_aligned, b_aligned, max_rank, made, tiles, splits, scaling,
                  {dropout_p, dropout_rng, layers});
  MLORA_CHECK(dys.size() == b.size() && (db.empty() || db.size() == b.size()),
              "dys, db: expected one of each layer");
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
  read_dy.need_gradient = !db.empty();
  for (size_t i = 0; i < dys.size(); ++i) {
    const Tensor& dy = dys[i];
    check_rows(dy, "dy", call.rows, dy.dim() == 2 ? dy.size(1) : 0, call.dtype);
    const int64_t first = static_cast<int64_t>(i) * call.row_numbers();
    GradientArguments& gradient = read_dy.gradient[i];
    gradient = call.gradient(dy, part(s, first), call.b[i], 1, slots);
    if (!db.empty()) {
      gradient.gradient = checked_gradient(db[i], call.b[i], "db");
      gradient.add = add;
      partials.add_gradient(gradient.partial, dy.size(1), 1, slots);
    }
    if (need_ds) {
      read_dy.ds[i] = call.shrink(dy, call.b[i], part(ds, first));
      read_dy.ds[i].dropout.layers += call.dropout.layers == nullptr ? 0 : i;
      partials.add_shrink(read_dy.ds[i].partial, dy.size(1), 1);
    }
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
  if (need_dx) {
    check_rows(dx, "product", call.rows, call.columns, call.dtype);
    read_x.dx = out_rows_of(dx);
    read_x.add_dx = !multiplies;
  }
  MLORA_CHECK(!multiplies || weights.size() == dys.size(), "weights: expected one of each layer, got ",
              weights.size());
  for (size_t i = 0; multiplies && i < dys.size(); ++i) {
    check_weight(weights[i], dys[i].size(1), call.columns, call.dtype);
  }
  partials.allocate(x);
  if (need_ds || !db.empty()) {
    check_launch(launch_read_dy(read_dy, call.queue), "read_dy");
  }
  if (need_ds) {
    check_launch(launch_read_x(read_x, call.queue), "read_x");
  }
  for (size_t i = 0; multiplies && i < dys.size(); ++i) {
    add_product(dx, dys[i], weights[i]);
  }
  return dx;
}

}  // namespace
}  // namespace mlora::cuda

#define MLORA_LIBRARY_OF(key) STABLE_TORCH_LIBRARY_IMPL(mlora_ext, key, library)
#ifndef MLORA_EMULATE
namespace mlora::cuda {
namespace {

// Newer minor versions of one major version need no newer driver.
std::string driver_refusal() {
  const auto [driver, runtime] = versions();
  if (driver == 0) {
    return "";
  }
  if (driver / 1000 >= runtime / 1000) {
    return has_code() ? ""
                      : "this build has no code for this GPU; build it with MLORA_CUDA_ARCHITECTURES of it";
  }
  std::ostringstream reason;
  reason << "this build is of CUDA " << runtime / 1000 << ", the driver serves CUDA " << driver / 1000
         << " only; update it, or build with the nvcc of CUDA " << driver / 1000;
  return reason.str();
}

}  // namespace
}  // namespace mlora::cuda

STABLE_TORCH_LIBRARY_IMPL(mlora_ext, CompositeExplicitAutograd, library) {
  library.impl("cuda_driver_refusal", TORCH_BOX(&mlora::cuda::driver_refusal));
}
#endif

MLORA_LIBRARY_OF(MLORA_DEVICE_KEY) {
  library.impl("cuda_plan", TORCH_BOX(&mlora::cuda::plan));
  library.impl("cuda_capture", TORCH_BOX(&mlora::cuda::capture));
  library.impl("cuda_forward", TORCH_BOX(&mlora::cuda::forward));
  library.impl("cuda_backward", TORCH_BOX(&mlora::cuda::backward));
}
