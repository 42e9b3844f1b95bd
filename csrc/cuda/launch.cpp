// The launches of docs/gpu.md as operators: torch's tensors in, torch-free launches out.
//
// Letters: T rows, d columns, N adapters, R largest rank.
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

// `out` is [T, R] in the dtype of rows for one column split, else fp32 [column splits, T, R].
ShrinkArguments shrink_arguments(const Tensor& rows, const FactorTable& factor, const Tensor& tiles,
                                 const Tensor& scaling, const DropoutTables& dropout, const Tensor& out) {
  const int64_t splits = ceil_div(rows.size(1), kColumnSplit);
  const bool partial = splits > 1;
  MLORA_CHECK(out.dim() == (partial ? 3 : 2), "out: expected ", partial ? 3 : 2, " dimensions, got shape ",
              shape_of(out));
  const int64_t split_stride = partial ? out.stride(0) : 0;
  check_dense(partial ? torch::stable::select(out, 0, 0) : out, "out", 2,
              partial ? ScalarType::Float : rows.scalar_type());
  check_dense(scaling, "scaling", 1, ScalarType::Float);
  MLORA_CHECK(out.size(partial ? 1 : 0) == rows.size(0) && (!partial || out.size(0) == splits),
              "out: expected ", splits, " parts of ", rows.size(0), " rows, got shape ", shape_of(out));
  return {scalar_of(rows.scalar_type()),
          rows_of(rows, "rows"),
          factor,
          tiles_of(tiles),
          static_cast<int>(tiles.size(0)),
          static_cast<const float*>(scaling.const_data_ptr()),
          dropout,
          out.mutable_data_ptr(),
          partial,
          split_stride,
          static_cast<int>(rows.size(1)),
          static_cast<int>(out.size(partial ? 2 : 1))};
}

void shrink(const Tensor& rows, const Tensor& factor, const Tensor& table, const Tensor& tiles,
            const Tensor& scaling, const std::optional<Tensor>& dropout_p,
            const std::optional<Tensor>& dropout_rng, const std::optional<Tensor>& layer, Tensor out) {
  const DropoutTables dropout = dropout_of(dropout_p, dropout_rng, layer, table.size(0));
  const ShrinkArguments arguments =
      shrink_arguments(rows, factor_of(factor, table, rows.scalar_type()), tiles, scaling, dropout, out);
  check_launch(launch_shrink(arguments, queue_of(rows)), "shrink");
}

void reduce_rows(const Tensor& partial, Tensor out) {
  check_dense(partial, "partial", 3, ScalarType::Float);
  check_dense(out, "out", 2, out.scalar_type());
  MLORA_CHECK(
      is_scalar(out.scalar_type()) && partial.size(1) == out.size(0) && partial.size(2) == out.size(1),
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
  const ExpandArguments arguments = {scalar_of(s.scalar_type()),
                                     rows_of(s, "s"),
                                     factor_of(factor, table, s.scalar_type()),
                                     tiles_of(tiles),
                                     static_cast<int>(tiles.size(0)),
                                     bias ? bias->const_data_ptr() : nullptr,
                                     {},
                                     rows_of(y, "y"),
                                     static_cast<int>(y.size(1)),
                                     static_cast<int>(s.size(1)),
                                     false};
  check_launch(launch_expand(arguments, queue_of(s)), "expand");
}

GradientArguments gradient_arguments(const Tensor& rows, const Tensor& s, const FactorTable& factor,
                                     const Tensor& tiles, const Tensor& splits, bool need_gradient, bool add,
                                     const Tensor& gradient, const Tensor& partial) {
  MLORA_CHECK(s.scalar_type() == rows.scalar_type() && s.size(0) == rows.size(0), "s: expected ",
              rows.size(0), " rows of ", dtype_name(rows.scalar_type()), ", got ",
              dtype_name(s.scalar_type()), " of shape ", shape_of(s));
  GradientArguments arguments = {};
  arguments.type = scalar_of(rows.scalar_type());
  arguments.rows = rows_of(rows, "rows");
  arguments.s = rows_of(s, "s");
  arguments.factor = factor;
  arguments.tiles = tiles_of(tiles);
  arguments.tile_count = static_cast<int>(tiles.size(0));
  arguments.splits = splits_of(splits);
  arguments.split_count = static_cast<int>(splits.size(0));
  arguments.columns = static_cast<int>(rows.size(1));
  arguments.ranks = static_cast<int>(s.size(1));
  if (need_gradient) {
    MLORA_CHECK(on_device(gradient) && is_scalar(gradient.scalar_type()) &&
                    scalar_of(gradient.scalar_type()) == factor.type,
                "gradient: expected the factor's dtype, got ", dtype_name(gradient.scalar_type()));
    check_dense(partial, "partial", 3, ScalarType::Float);
    MLORA_CHECK(partial.size(0) == 0 || (partial.size(1) == s.size(1) && partial.size(2) == rows.size(1)),
                "partial: expected [slots, ", s.size(1), ", ", rows.size(1), "], got ", shape_of(partial));
    arguments.gradient = gradient.mutable_data_ptr();
    arguments.partial = static_cast<float*>(partial.mutable_data_ptr());
    arguments.add = add;
  }
  return arguments;
}

void read_dy(const Tensor& dy, const Tensor& s, const Tensor& factor, const Tensor& table,
             const Tensor& tiles, const Tensor& splits, const Tensor& scaling, bool need_ds,
             bool need_gradient, bool add, Tensor ds, Tensor gradient, Tensor partial) {
  const FactorTable factors = factor_of(factor, table, dy.scalar_type());
  const GradientArguments gradients =
      gradient_arguments(dy, s, factors, tiles, splits, need_gradient, add, gradient, partial);
  const ShrinkArguments shrunk =
      need_ds ? shrink_arguments(dy, factors, tiles, scaling, {}, ds) : ShrinkArguments{};
  MLORA_CHECK(!need_ds || shrunk.ranks == gradients.ranks, "ds: expected ", gradients.ranks,
              " columns, got shape ", shape_of(ds));
  check_launch(launch_read_dy(shrunk, need_ds, gradients, need_gradient, queue_of(dy)), "read_dy");
}

void read_x(const Tensor& x, const Tensor& ds, const Tensor& factor, const Tensor& table, const Tensor& tiles,
            const Tensor& splits, const std::optional<Tensor>& dropout_p,
            const std::optional<Tensor>& dropout_rng, const std::optional<Tensor>& layer, bool need_dx,
            bool need_gradient, bool add, bool add_dx, Tensor dx, Tensor gradient, Tensor partial) {
  GradientArguments arguments = gradient_arguments(x, ds, factor_of(factor, table, x.scalar_type()), tiles,
                                                   splits, need_gradient, add, gradient, partial);
  arguments.dropout = dropout_of(dropout_p, dropout_rng, layer, table.size(0));
  if (need_dx) {
    check_dense(dx, "dx", 2, x.scalar_type());
    MLORA_CHECK(dx.size(0) == x.size(0) && dx.size(1) == x.size(1), "dx: expected shape ", shape_of(x),
                ", got ", shape_of(dx));
    arguments.dx = rows_of(dx, "dx");
    arguments.add_dx = add_dx;
  }
  check_launch(launch_read_x(arguments, queue_of(x)), "read_x");
}

void reduce_gradients(const Tensor& partial, const Tensor& table, const Tensor& groups, int64_t columns,
                      bool add, Tensor gradient) {
  check_dense(partial, "partial", 3, ScalarType::Float);
  check_table(groups, "groups", 4, ScalarType::Int);
  check_table(table, "table", 8, ScalarType::Long);
  MLORA_CHECK(on_device(gradient) && is_scalar(gradient.scalar_type()),
              "gradient: expected dtype Float, BFloat16 or Half, got ", dtype_name(gradient.scalar_type()));
  MLORA_CHECK(groups.size(0) == table.size(0), "groups: expected ", table.size(0), " rows, got ",
              groups.size(0));
  if (partial.size(0) == 0) {
    return;
  }
  MLORA_CHECK(partial.size(2) == columns, "partial: expected ", columns, " columns, got shape ",
              shape_of(partial));
  const FactorTable factor = {nullptr, static_cast<const FactorRow*>(table.const_data_ptr()),
                              scalar_of(gradient.scalar_type())};
  check_launch(
      launch_reduce_gradients(static_cast<const float*>(partial.const_data_ptr()), factor,
                              static_cast<const Group*>(groups.const_data_ptr()),
                              static_cast<int>(groups.size(0)), static_cast<int>(partial.size(1)),
                              static_cast<int>(columns), gradient.mutable_data_ptr(), add, queue_of(partial)),
      "reduce_gradients");
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
