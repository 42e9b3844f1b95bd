// What both directions of the operator make of their arguments: checked tables, and memory of partial sums.
#pragma once

#include <optional>
#include <vector>

#include "cuda/read_dy_once.h"
#include "cuda/tickets.h"

namespace mlora::cuda {

using Tensors = std::vector<Tensor>;
using OptionalTensor = std::optional<Tensor>;

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
  int64_t ranks;  // R; in 16 bits padded, so that rows of s begin at multiples of 16 bytes
  FactorTable a;
  FactorTable b;
  PlanView plan;
  PartView parts;  // without starts where the plan has none
  const float* scaling;
  DropoutTables dropout;

  Call(const Tensor& x, size_t layer_count, const Tensor& a_first, const Tensor& a_table,
       const Tensor& b_first, const Tensor& b_table, bool a_aligned, bool b_aligned, int64_t max_rank,
       const Tensor& made, int64_t tiles, int64_t splits, const Tensor& scale, const DropoutInputs& inputs)
      : queue(queue_of(x)),
        dtype(x.scalar_type()),
        type(scalar_of(x.scalar_type())),
        rows(x.size(0)),
        columns(x.dim() == 2 ? x.size(1) : -1),
        layers(static_cast<int64_t>(layer_count)),
        adapters(scale.numel()),
        ranks(type == Scalar::kFloat ? max_rank : 8 * int64_t{ceil_div(max_rank, 8)}),
        parts() {
    MLORA_CHECK(is_scalar(dtype), "x: expected dtype Float, BFloat16 or Half, got ", dtype_name(dtype));
    check_rows(x, "x", rows, columns, dtype);
    MLORA_CHECK(layers >= 1 && layers <= kMostLayers, "weights, products or dys: expected 1 to ", kMostLayers,
                " layers, got ", layers);
    MLORA_CHECK(ranks >= 1, "max_rank: expected at least 1, got ", ranks);
    check_dense(scale, "scaling", 1, ScalarType::Float);
    scaling = static_cast<const float*>(scale.const_data_ptr());
    a = factor_of(a_first, a_table, "a_table", a_aligned);
    b = factor_of(b_first, b_table, "b_table", b_aligned);
    check_table(made, "plan", 4, ScalarType::Int);
    const int64_t parts_there = made.size(0) - tiles - splits - adapters - start_rows(rows);
    MLORA_CHECK(
        tiles >= 0 && splits >= 0 && (parts_there == -start_rows(rows) || parts_there >= most_parts(rows, 0)),
        "plan: expected ", tiles, " + ", splits, " + ", adapters, " rows, got ", made.size(0));
    const Tile* first = static_cast<const Tile*>(made.const_data_ptr());
    const Split* first_split = reinterpret_cast<const Split*>(first + tiles);
    plan = {first, static_cast<int32_t>(tiles), first_split, static_cast<int32_t>(splits),
            reinterpret_cast<const Group*>(first_split + splits)};
    if (parts_there >= 0) {
      const Tile* first_part = first + tiles + splits + adapters;
      parts = {reinterpret_cast<const int32_t*>(first_part + parts_there), first_part};
    }
    set_dropout(inputs);
  }

  int64_t row_numbers() const { return rows * ranks; }

  // B of one layer.
  FactorTable b_of(size_t layer) const {
    FactorTable one = b;
    one.rows += static_cast<int64_t>(layer) * adapters;
    return one;
  }

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
  // `first` is the first adapter's matrix of the first layer; `table` says where the others lie.
  FactorTable factor_of(const Tensor& first, const Tensor& table, const char* name, bool aligned) const {
    check_table(table, name, 8, ScalarType::Long);
    MLORA_CHECK(table.size(0) == layers * adapters, name, ": expected ", layers * adapters, " rows, got ",
                table.size(0));
    MLORA_CHECK(
        on_device(first) && (first.scalar_type() == dtype || first.scalar_type() == ScalarType::Float), name,
        ": expected matrices of dtype ", dtype_name(dtype), " (that of x) or Float, got ",
        dtype_name(first.scalar_type()));
    return {first.const_data_ptr(), static_cast<const FactorRow*>(table.const_data_ptr()),
            static_cast<int>(adapters), scalar_of(first.scalar_type()), aligned};
  }

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

// fp32 numbers, and tickets, of which parts are taken one after the other.
class Partials {
 public:
  explicit Partials(const Call& call) : call_(call) {}

  // Decides how many programs share a sum over columns.
  void add_shrink(ShrinkArguments& shrink, int64_t of_layers) {
    const int64_t tickets = shrink_tickets(call_.type, call_.plan.tile_count, of_layers, call_.ranks);
    shrink.parts = shrink_parts(call_.queue, tickets * (call_.layers / of_layers), shrink.columns);
    if (shrink.parts > 1) {
      add(shrink.partial, 2 * shrink.parts * of_layers * call_.row_numbers(), tickets);
    }
  }
  // Of a sum over columns that clusters share.
  void add_clusters(ShrinkArguments& ds) {
    ds.parts = once_clusters(ds.columns);
    if (ds.parts > 1) {
      add(ds.partial, ds.parts * call_.rows * once_sums(ds.ranks),
          once_tickets(call_.plan.split_count, call_.ranks));
    }
  }
  void add_gradient(Partial& partial, int64_t columns, int64_t of_layers, int64_t slots) {
    if (slots > 0) {
      add(partial, of_layers * slots * call_.ranks * columns,
          gradient_tickets(call_.adapters, of_layers, columns, call_.ranks));
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
    numbers_ += (numbers + 3) / 4 * 4;  // each begins at a multiple of 16 bytes
    tickets_ += tickets;
  }

  const Call& call_;
  std::vector<Wanted> wanted_;
  int64_t numbers_ = 0;
  int64_t tickets_ = 0;
  OptionalTensor sums_, tickets_memory_;
};

}  // namespace mlora::cuda
