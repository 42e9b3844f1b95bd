#include <algorithm>

#include "cpu/base_gemm.h"
#include "cpu/lora_linear.h"
#include "cpu/operands.h"
#include "cpu/plan.h"

namespace mlora::cpu {
namespace {

const Tensor* pointer(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

// With the parameter's strides where it is a dense matrix or the transpose of one, else dense rows.
Tensor empty_gradient(const Tensor& parameter) {
  const int64_t rows = parameter.size(0);
  const int64_t cols = parameter.size(1);
  const bool transposed_rows = parameter.stride(0) == 1 && parameter.stride(1) == rows;
  return transposed_rows ? empty_cpu({rows, cols}, {1, rows}, parameter.scalar_type())
                         : empty_cpu(rows, cols, parameter.scalar_type());
}

std::vector<Tensor> empty_gradients(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const Tensor& parameter : parameters) {
    gradients.push_back(empty_gradient(parameter));
  }
  return gradients;
}

void check_gradient(const Tensor& dy, const Tensor& x, int64_t d_out) {
  MLORA_CHECK(dy.is_cpu() && dy.dim() == 2 && dy.size(0) == x.size(0) && dy.size(1) == d_out &&
                  dy.scalar_type() == x.scalar_type(),
              "dy: expected a CPU ", dtype_name(x.scalar_type()), " matrix [", x.size(0), ", ", d_out,
              "], got ", dtype_name(dy.scalar_type()), " of shape ", shape_of(dy));
}

void check_intermediate(const Tensor& s, const Tensor& x, int64_t max_rank) {
  MLORA_CHECK(s.is_cpu() && s.dim() == 2 && s.size(0) == x.size(0) && s.size(1) == max_rank &&
                  s.scalar_type() == x.scalar_type(),
              "s: expected the second output of lora_linear, ", dtype_name(x.scalar_type()), " [", x.size(0),
              ", ", max_rank, "], got ", dtype_name(s.scalar_type()), " of shape ", shape_of(s));
}

// The gradients of A or of B: the sums of each adapter's groups, and the matrices that they become.
class GradientSums {
 public:
  // Without gradients: not wanted.
  GradientSums(const Kernels& table, const Plan& plan, const std::vector<int32_t>& groups, int64_t threads,
               const Matrices& gradients, bool add, int64_t cols, Workspace& workspace)
      : table_(table),
        plan_(plan),
        gradients_(gradients),
        add_(add),
        cols_(cols),
        workspace_(workspace),
        groups_(groups),
        offsets_(gradients.count()) {
    for (size_t i = 0; i < gradients.count(); ++i) {
      if (groups_[i] == 1) {
        alone_bytes_ = std::max(alone_bytes_, size_of(i) * kFloat);
      } else if (groups_[i] > 1) {
        offsets_[i] = workspace.reserve(groups_[i] * size_of(i) * kFloat);
      }
    }
    alone_bytes_ = (alone_bytes_ + 63) / 64 * 64;
    alone_ = workspace.reserve(alone_bytes_ * threads);
  }

  float* of(const BlockGroup& group, int64_t thread) const {
    if (gradients_.count() == 0) {
      return nullptr;
    }
    const size_t i = static_cast<size_t>(group.adapter);
    const int64_t offset =
        groups_[i] == 1 ? alone_ + thread * alone_bytes_ : offsets_[i] + group.index * size_of(i) * kFloat;
    return reinterpret_cast<float*>(workspace_.at(offset));
  }

  // The only group of an adapter: its sums are in this thread's caches.
  void write_if_alone(const BlockGroup& group, int64_t thread) const {
    if (gradients_.count() > 0 && groups_[static_cast<size_t>(group.adapter)] == 1) {
      table_.write_gradient(args_of(static_cast<size_t>(group.adapter), of(group, thread)));
    }
  }

  // What is still to be written: gradients of several groups, and new ones of none, which are zero.
  void add_pieces(std::vector<GradientArgs>& pieces) const {
    constexpr int64_t kColumns = 512;
    for (size_t i = 0; i < gradients_.count(); ++i) {
      if (groups_[i] > 1 || (groups_[i] == 0 && !add_)) {
        GradientArgs piece = args_of(i, reinterpret_cast<const float*>(workspace_.at(offsets_[i])));
        for (piece.begin = 0; piece.begin < cols_; piece.begin += kColumns) {
          piece.end = std::min(cols_, piece.begin + kColumns);
          pieces.push_back(piece);
        }
      }
    }
  }

 private:
  static constexpr int64_t kFloat = sizeof(float);

  int64_t size_of(size_t adapter) const { return table_.sums_size(plan_.adapters[adapter].rank, cols_); }
  GradientArgs args_of(size_t adapter, const float* sums) const {
    return {sums,
            groups_[adapter],
            size_of(adapter),
            plan_.adapters[adapter].rank,
            cols_,
            0,
            cols_,
            gradients_.at(adapter),
            add_};
  }

  const Kernels& table_;
  const Plan& plan_;
  const Matrices& gradients_;
  bool add_;
  int64_t cols_;
  const Workspace& workspace_;
  const std::vector<int32_t>& groups_;  // of each adapter
  std::vector<int64_t> offsets_;
  int64_t alone_bytes_ = 0;
  int64_t alone_ = 0;
};

// The gradients of A and B, one matrix per adapter or none; with `add`, to be added to what is there.
struct Gradients {
  Matrices a;
  Matrices b;
  bool add;
};

// dA, dB, and dx, which holds dy W already and receives the low-rank part; null: not wanted.
void low_rank_backward(const Tensor& dy, const Tensor& x, const Tensor& s_in, const Adapters& adapters,
                       const Layout& layout, Tensor* dx, const Gradients& gradients) {
  const Kernels& table = kernels(scalar_of(x.scalar_type()));
  Plan plan = make_plan(layout, adapters.ranks, x.size(0));
  check_intermediate(s_in, x, plan.max_rank);
  const Tensor s = dense_rows(s_in);
  const Team team(plan.rank_rows * (x.size(1) + dy.size(1)));
  const std::vector<BlockGroup> groups = groups_of(plan, x.size(1) + dy.size(1));
  std::vector<int32_t> tasks(plan.adapters.size());
  for (const BlockGroup& group : groups) {
    ++tasks[static_cast<size_t>(group.adapter)];
  }
  Workspace workspace;
  Operands operands(table, plan.adapters, tasks, workspace);
  if (dx) {
    operands.add_a(adapters.a, x.size(1), Along::kRank);
  }
  if (dx || gradients.a.count() > 0) {
    operands.add_b(adapters.b, dy.size(1), Along::kColumns);
  }
  const int64_t threads = std::clamp<int64_t>(static_cast<int64_t>(groups.size()), 1, team.threads());
  operands.reserve(threads);
  const GradientSums sums_a(table, plan, tasks, threads, gradients.a, gradients.add, x.size(1), workspace);
  const GradientSums sums_b(table, plan, tasks, threads, gradients.b, gradients.add, dy.size(1), workspace);
  const int64_t scratch_bytes = table.scratch_bytes(plan.max_rank);
  const int64_t scratch = workspace.reserve(scratch_bytes * threads);
  workspace.allocate();
  operands.pack_shared(team);

  BackwardArgs args{};
  args.blocks = plan.blocks.data();
  args.dy = dy.const_data_ptr();
  args.dy_stride = dy.stride(0);
  args.d_out = dy.size(1);
  args.s = s.const_data_ptr();
  args.s_stride = s.stride(0);
  args.x = x.const_data_ptr();
  args.x_stride = x.stride(0);
  args.d_in = x.size(1);
  if (dx) {
    args.dx = dx->mutable_data_ptr();
    args.dx_stride = dx->stride(0);
  }
  team.run(static_cast<int64_t>(groups.size()), [&](int64_t task, int64_t thread) {
    const BlockGroup& group = groups[static_cast<size_t>(task)];
    BackwardArgs mine = args;
    mine.adapter = &plan.adapters[static_cast<size_t>(group.adapter)];
    mine.first_block = group.first_block;
    mine.block_count = group.block_count;
    mine.da = sums_a.of(group, thread);
    mine.db = sums_b.of(group, thread);
    mine.scratch = workspace.at(scratch + thread * scratch_bytes);
    operands.pack_alone(group.adapter, thread);
    table.backward(mine);
    sums_a.write_if_alone(group, thread);
    sums_b.write_if_alone(group, thread);
  });
  std::vector<GradientArgs> pieces;
  sums_a.add_pieces(pieces);
  sums_b.add_pieces(pieces);
  team.run(static_cast<int64_t>(pieces.size()),
           [&](int64_t task, int64_t) { table.write_gradient(pieces[static_cast<size_t>(task)]); });
}

}  // namespace

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>> lora_linear_backward(
    const Tensor& dy_in, const Tensor& x_in, const Tensor& weight, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& s, const Tensor& segments, const Tensor& scaling,
    const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
    const std::optional<Tensor>& layer, bool need_dx, bool need_da, bool need_db,
    const std::optional<Tensor>& packed) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  check_base(x_in, weight, nullptr);
  check_adapters(x_in, weight.size(0), lora_a, lora_b, layout);
  check_gradient(dy_in, x_in, weight.size(0));
  const Tensor dy = dense_rows(dy_in);
  std::vector<Tensor> da = need_da ? empty_gradients(lora_a) : std::vector<Tensor>();
  std::vector<Tensor> db = need_db ? empty_gradients(lora_b) : std::vector<Tensor>();
  Tensor dx = need_dx ? base_linear_dx(dy, weight, pointer(packed)) : empty_cpu({0}, {1}, dy.scalar_type());
  low_rank_backward(dy, dense_rows(x_in), s, adapters_of(lora_a, lora_b), layout, need_dx ? &dx : nullptr,
                    Gradients{Matrices(da, false), Matrices(db, true), false});
  return {dx, da, db};
}

Tensor lora_linear_backward_table(const Tensor& dy_in, const Tensor& x, const Tensor& weight,
                                  const std::optional<Tensor>& packed, const Tensor& a, const Tensor& a_table,
                                  Tensor da, const Tensor& b, const Tensor& b_table, Tensor db,
                                  const Tensor& s, const Tensor& segments, const Tensor& scaling,
                                  const std::optional<Tensor>& dropout_p,
                                  const std::optional<Tensor>& dropout_rng,
                                  const std::optional<Tensor>& layer, bool need_dx) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  check_base(x, weight, nullptr);
  check_layout(layout, a_table.size(0));
  check_gradient(dy_in, x, weight.size(0));
  const Tensor dy = dense_rows(dy_in);
  Tensor dx = need_dx ? base_linear_dx(dy, weight, pointer(packed)) : empty_cpu({0}, {1}, dy.scalar_type());
  low_rank_backward(dy, dense_rows(x), s, adapters_of(a, a_table, b, b_table), layout,
                    need_dx ? &dx : nullptr,
                    Gradients{gradients_of(da, a_table), gradients_of(db, b_table), true});
  return dx;
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>> lora_add_backward(
    const Tensor& dy, const Tensor& x, std::optional<Tensor> dx, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& s, const Tensor& segments, const Tensor& scaling,
    const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
    const std::optional<Tensor>& layer, bool need_da, bool need_db) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  MLORA_CHECK(dy.dim() == 2, "dy: expected a matrix, got shape ", shape_of(dy));
  check_adapters(x, dy.size(1), lora_a, lora_b, layout);
  check_gradient(dy, x, dy.size(1));
  if (dx) {
    check_product(*dx, "dx", x, x.size(1));
  }
  std::vector<Tensor> da = need_da ? empty_gradients(lora_a) : std::vector<Tensor>();
  std::vector<Tensor> db = need_db ? empty_gradients(lora_b) : std::vector<Tensor>();
  low_rank_backward(dense_rows(dy), dense_rows(x), s, adapters_of(lora_a, lora_b), layout,
                    dx ? &*dx : nullptr, Gradients{Matrices(da, false), Matrices(db, true), false});
  return {da, db};
}

void lora_add_backward_table(const Tensor& dy, const Tensor& x, std::optional<Tensor> dx, const Tensor& a,
                             const Tensor& a_table, Tensor da, const Tensor& b, const Tensor& b_table,
                             Tensor db, const Tensor& s, const Tensor& segments, const Tensor& scaling,
                             const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
                             const std::optional<Tensor>& layer) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  MLORA_CHECK(dy.dim() == 2, "dy: expected a matrix, got shape ", shape_of(dy));
  check_layout(layout, a_table.size(0));
  check_gradient(dy, x, dy.size(1));
  if (dx) {
    check_product(*dx, "dx", x, x.size(1));
  }
  low_rank_backward(dense_rows(dy), dense_rows(x), s, adapters_of(a, a_table, b, b_table), layout,
                    dx ? &*dx : nullptr,
                    Gradients{gradients_of(da, a_table), gradients_of(db, b_table), true});
}

}  // namespace mlora::cpu
