// The launches of docs/gpu.md as operators: torch's tensors in, torch-free launches out.
//
// Letters: T rows, d columns, N adapters, R largest rank, L layers that share x.
#include "cuda/device_tensors.h"

#ifdef MLORA_EMULATE
#define MLORA_DEVICE_KEY CPU
#else
#define MLORA_DEVICE_KEY CUDA
#endif

namespace mlora::cuda {
namespace {

void plan(const Tensor& segments, int64_t total_rows, Tensor tiles, Tensor splits, Tensor groups) {
  check_table(segments, "segments", 4, ScalarType::Long);
  check_table(groups, "groups", 4, ScalarType::Int);
  MLORA_CHECK(total_rows >= 0 && total_rows <= INT32_MAX, "total_rows: expected 0 to ", INT32_MAX, ", got ",
              total_rows);
  const Batch batch = {static_cast<const Segment*>(segments.const_data_ptr()),
                       static_cast<int32_t>(segments.size(0)), static_cast<int32_t>(groups.size(0)),
                       total_rows};
  const PlanTables tables = {const_cast<Tile*>(tiles_of(tiles)), static_cast<int32_t>(tiles.size(0)),
                             const_cast<Split*>(splits_of(splits)), static_cast<int32_t>(splits.size(0)),
                             static_cast<Group*>(groups.mutable_data_ptr())};
  const int32_t least_tiles = ceil_div(total_rows, kTileRows) + 2 * batch.segment_count + 1;
  MLORA_CHECK(tables.tile_count >= least_tiles, "tiles: expected at least ", least_tiles, " rows, got ",
              tables.tile_count);
  const int32_t least_splits = ceil_div(least_tiles, kSplitTiles) + batch.adapters + 1;
  MLORA_CHECK(tables.split_count >= least_splits, "splits: expected at least ", least_splits, " rows, got ",
              tables.split_count);
  check_launch(launch_plan(batch, tables, queue_of(segments)), "plan");
}

// `out` is [L, T, R] in the dtype of rows for one column split, else fp32 [column splits, L, T, R].
ShrinkArguments shrink_arguments(const Tensor& rows, const Tensor& factor, const Tensor& table,
                                 const Tensor& tiles, const Tensor& scaling, const DropoutInputs& dropout,
                                 const Tensor& out) {
  const int64_t splits = ceil_div(rows.size(1), kColumnSplit);
  const bool partial = splits > 1;
  check_dense(out, "out", partial ? 4 : 3, partial ? ScalarType::Float : rows.scalar_type());
  check_dense(scaling, "scaling", 1, ScalarType::Float);
  const int64_t layers = out.size(partial ? 1 : 0), ranks = out.size(partial ? 3 : 2);
  MLORA_CHECK(out.size(partial ? 2 : 1) == rows.size(0) && (!partial || out.size(0) == splits),
              "out: expected ", splits, " parts of ", rows.size(0), " rows, got shape ", shape_of(out));
  const FactorTable factors = factor_of(factor, table, layers, rows.scalar_type());
  MLORA_CHECK(scaling.size(0) == factors.adapters, "scaling: expected ", factors.adapters, " numbers, got ",
              scaling.size(0));
  ShrinkArguments arguments = {};
  arguments.type = scalar_of(rows.scalar_type());
  arguments.rows = rows_of(rows, "rows");
  arguments.factor = factors;
  arguments.tiles = tiles_of(tiles);
  arguments.tile_count = static_cast<int>(tiles.size(0));
  arguments.scaling = static_cast<const float*>(scaling.const_data_ptr());
  arguments.dropout = dropout_of(dropout, factors.adapters, layers);
  arguments.out = out.mutable_data_ptr();
  arguments.partial = partial;
  arguments.layer_stride = rows.size(0) * ranks;
  arguments.layers = static_cast<int>(layers);
  arguments.columns = static_cast<int>(rows.size(1));
  arguments.ranks = static_cast<int>(ranks);
  return arguments;
}

void shrink(const Tensor& rows, const Tensor& factor, const Tensor& table, const Tensor& tiles,
            const Tensor& scaling, const std::optional<Tensor>& dropout_p,
            const std::optional<Tensor>& dropout_rng, const std::optional<Tensor>& layers, Tensor out) {
  const DropoutInputs dropout = {dropout_p, dropout_rng, layers};
  const ShrinkArguments arguments = shrink_arguments(rows, factor, table, tiles, scaling, dropout, out);
  check_launch(launch_shrink(arguments, queue_of(rows)), "shrink");
}

void reduce_rows(const Tensor& partial, Tensor out) {
  check_dense(partial, "partial", 4, ScalarType::Float);
  check_dense(out, "out", 3, out.scalar_type());
  MLORA_CHECK(is_scalar(out.scalar_type()) && partial.size(1) == out.size(0) &&
                  partial.size(2) == out.size(1) && partial.size(3) == out.size(2),
              "out: expected the sum of partial ", shape_of(partial), ", got ", dtype_name(out.scalar_type()),
              " of shape ", shape_of(out));
  check_launch(launch_reduce_rows(static_cast<const float*>(partial.const_data_ptr()),
                                  static_cast<int>(partial.size(0)), out.numel(),
                                  scalar_of(out.scalar_type()), out.mutable_data_ptr(), queue_of(partial)),
               "reduce_rows");
}

void expand(const Tensor& s, const Tensor& factor, const Tensor& table, const Tensor& tiles,
            const std::optional<Tensor>& bias, Tensor y) {
  check_dense(y, "y", 2, s.scalar_type());
  if (bias) {
    check_dense(*bias, "bias", 1, s.scalar_type());
    MLORA_CHECK(bias->size(0) == y.size(1), "bias: expected ", y.size(1), " numbers, got ", bias->size(0));
  }
  ExpandArguments arguments = {};
  arguments.type = scalar_of(s.scalar_type());
  arguments.s = rows_of(s, "s");
  arguments.layers = 1;
  arguments.factor = factor_of(factor, table, 1, s.scalar_type());
  arguments.tiles = tiles_of(tiles);
  arguments.tile_count = static_cast<int>(tiles.size(0));
  arguments.bias = bias ? bias->const_data_ptr() : nullptr;
  arguments.out = rows_of(y, "y");
  arguments.columns = static_cast<int>(y.size(1));
  arguments.ranks = static_cast<int>(s.size(1));
  check_launch(launch_expand(arguments, queue_of(s)), "expand");
}

// `s` is [L, T, R], or [T, R] of one layer; gradient and partial are both given or both absent. The names are
// those that the operator's caller knows the first two by.
GradientArguments gradient_arguments(const char* rows_name, const char* s_name, const Tensor& rows,
                                     const Tensor& s, const Tensor& factor, const Tensor& table,
                                     const Tensor& tiles, const Tensor& splits,
                                     const std::optional<Tensor>& gradient,
                                     const std::optional<Tensor>& partial, bool add) {
  const int64_t dimensions = s.dim();
  check_dense(s, s_name, dimensions == 2 ? 2 : 3, rows.scalar_type());
  const int64_t layers = dimensions == 2 ? 1 : s.size(0), ranks = s.size(dimensions - 1);
  MLORA_CHECK(s.size(dimensions - 2) == rows.size(0), s_name, ": expected ", rows.size(0),
              " rows, got shape ", shape_of(s));
  MLORA_CHECK(gradient.has_value() == partial.has_value(), "gradient and partial: give both or none");
  GradientArguments arguments = {};
  arguments.type = scalar_of(rows.scalar_type());
  arguments.rows = rows_of(rows, rows_name);
  arguments.s = dense_rows(s.mutable_data_ptr(), ranks, s.element_size());
  arguments.layer_stride = rows.size(0) * ranks;
  arguments.layers = static_cast<int>(layers);
  arguments.factor = factor_of(factor, table, layers, rows.scalar_type());
  arguments.tiles = tiles_of(tiles);
  arguments.tile_count = static_cast<int>(tiles.size(0));
  arguments.splits = splits_of(splits);
  arguments.split_count = static_cast<int>(splits.size(0));
  arguments.columns = static_cast<int>(rows.size(1));
  arguments.ranks = static_cast<int>(ranks);
  if (gradient) {
    MLORA_CHECK(on_device(*gradient) && is_scalar(gradient->scalar_type()) &&
                    scalar_of(gradient->scalar_type()) == arguments.factor.type,
                "gradient: expected the factor's dtype, got ", dtype_name(gradient->scalar_type()));
    check_dense(*partial, "partial", 3, ScalarType::Float);
    MLORA_CHECK(
        partial->size(0) % layers == 0 && partial->size(1) == ranks && partial->size(2) == rows.size(1),
        "partial: expected [", layers, " times the slots, ", ranks, ", ", rows.size(1), "], got ",
        shape_of(*partial));
    arguments.gradient = gradient->mutable_data_ptr();
    arguments.partial = static_cast<float*>(partial->mutable_data_ptr());
    arguments.slots = static_cast<int>(partial->size(0) / layers);
    arguments.add = add;
  }
  return arguments;
}

void read_dy(const Tensor& dy, const Tensor& s, const Tensor& factor, const Tensor& table,
             const Tensor& tiles, const Tensor& splits, const Tensor& scaling, std::optional<Tensor> ds,
             std::optional<Tensor> gradient, std::optional<Tensor> partial, bool add) {
  const GradientArguments gradients =
      gradient_arguments("dy", "s", dy, s, factor, table, tiles, splits, gradient, partial, add);
  MLORA_CHECK(gradients.layers == 1, "s: expected one layer, got shape ", shape_of(s));
  const ShrinkArguments shrunk =
      ds ? shrink_arguments(dy, factor, table, tiles, scaling, {}, *ds) : ShrinkArguments{};
  MLORA_CHECK(!ds || (shrunk.ranks == gradients.ranks && shrunk.layers == 1), "ds: expected one layer and ",
              gradients.ranks, " columns, got shape ", shape_of(*ds));
  check_launch(launch_read_dy(shrunk, ds.has_value(), gradients, gradient.has_value(), queue_of(dy)),
               "read_dy");
}

void read_x(const Tensor& x, const Tensor& ds, const Tensor& factor, const Tensor& table, const Tensor& tiles,
            const Tensor& splits, const std::optional<Tensor>& dropout_p,
            const std::optional<Tensor>& dropout_rng, const std::optional<Tensor>& layers,
            std::optional<Tensor> dx, std::optional<Tensor> gradient, std::optional<Tensor> partial,
            bool add) {
  GradientArguments arguments =
      gradient_arguments("x", "ds", x, ds, factor, table, tiles, splits, gradient, partial, add);
  arguments.dropout =
      dropout_of({dropout_p, dropout_rng, layers}, arguments.factor.adapters, arguments.layers);
  if (dx) {
    check_dense(*dx, "dx", 2, x.scalar_type());
    MLORA_CHECK(dx->size(0) == x.size(0) && dx->size(1) == x.size(1), "dx: expected shape ", shape_of(x),
                ", got ", shape_of(*dx));
    arguments.dx = rows_of(*dx, "dx");
  }
  check_launch(launch_read_x(arguments, queue_of(x)), "read_x");
}

void reduce_gradients(const Tensor& table, const Tensor& groups, Tensor gradient, const Tensor& partial,
                      bool add) {
  check_dense(partial, "partial", 3, ScalarType::Float);
  check_table(groups, "groups", 4, ScalarType::Int);
  check_table(table, "table", 8, ScalarType::Long);
  MLORA_CHECK(on_device(gradient) && is_scalar(gradient.scalar_type()),
              "gradient: expected dtype Float, BFloat16 or Half, got ", dtype_name(gradient.scalar_type()));
  const int64_t adapters = groups.size(0);
  MLORA_CHECK(adapters > 0 && table.size(0) % adapters == 0, "table: expected a multiple of ", adapters,
              " rows, got ", table.size(0));
  const int64_t layers = table.size(0) / adapters;
  MLORA_CHECK(partial.size(0) % layers == 0, "partial: expected ", layers, " times the slots, got shape ",
              shape_of(partial));
  if (partial.size(0) == 0) {
    return;
  }
  ReduceArguments arguments = {};
  arguments.partial = static_cast<const float*>(partial.const_data_ptr());
  arguments.slots = static_cast<int>(partial.size(0) / layers);
  arguments.factor = {nullptr, static_cast<const FactorRow*>(table.const_data_ptr()),
                      static_cast<int>(adapters), scalar_of(gradient.scalar_type())};
  arguments.layers = static_cast<int>(layers);
  arguments.groups = static_cast<const Group*>(groups.const_data_ptr());
  arguments.gradient = gradient.mutable_data_ptr();
  arguments.columns = static_cast<int>(partial.size(2));
  arguments.ranks = static_cast<int>(partial.size(1));
  arguments.add = add;
  check_launch(launch_reduce_gradients(arguments, queue_of(partial)), "reduce_gradients");
}

}  // namespace
}  // namespace mlora::cuda

#define MLORA_LIBRARY_OF(key) STABLE_TORCH_LIBRARY_IMPL(mlora_ext, key, library)
MLORA_LIBRARY_OF(MLORA_DEVICE_KEY) {
  library.impl("cuda_plan", TORCH_BOX(&mlora::cuda::plan));
  library.impl("cuda_shrink", TORCH_BOX(&mlora::cuda::shrink));
  library.impl("cuda_reduce_rows", TORCH_BOX(&mlora::cuda::reduce_rows));
  library.impl("cuda_expand", TORCH_BOX(&mlora::cuda::expand));
  library.impl("cuda_read_dy", TORCH_BOX(&mlora::cuda::read_dy));
  library.impl("cuda_read_x", TORCH_BOX(&mlora::cuda::read_x));
  library.impl("cuda_reduce_gradients", TORCH_BOX(&mlora::cuda::reduce_gradients));
}
