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

// The gradient of A or of B: the sums of each adapter's groups, and the tensors that they become.
class Gradient {
 public:
  // `tensors` is empty where the gradient is not wanted.
  Gradient(const Kernels& table, const Plan& plan, const std::vector<BlockGroup>& groups, const Team& team,
           const std::vector<Tensor>& tensors, bool transpose, Workspace& workspace)
      : table_(table), workspace_(workspace), adapters_(tensors.size()) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      GradientArgs& args = adapters_[i].args;
      args.rank = plan.adapters[i].rank;
      args.cols = tensors[i].size(transpose ? 0 : 1);
      args.end = args.cols;
      args.grad = view_of(tensors[i], transpose);
      args.next = table.sums_size(args.rank, args.cols);
    }
    for (const BlockGroup& group : groups) {
      if (!tensors.empty()) {
        ++adapters_[static_cast<size_t>(group.adapter)].args.groups;
      }
    }
    for (Adapter& adapter : adapters_) {
      if (adapter.args.groups == 1) {
        alone_bytes_ = std::max(alone_bytes_, adapter.args.next * kFloat);
      } else if (adapter.args.groups > 1) {
        adapter.offset = workspace.reserve(adapter.args.groups * adapter.args.next * kFloat);
      }
    }
    alone_bytes_ = (alone_bytes_ + 63) / 64 * 64;
    alone_ = workspace.reserve(alone_bytes_ * team.threads());
  }

  float* sums_of(const BlockGroup& group, int64_t thread) const {
    if (adapters_.empty()) {
      return nullptr;
    }
    const Adapter& adapter = adapters_[static_cast<size_t>(group.adapter)];
    const int64_t offset = adapter.args.groups == 1
                               ? alone_ + thread * alone_bytes_
                               : adapter.offset + group.index * adapter.args.next * kFloat;
    return reinterpret_cast<float*>(workspace_.at(offset));
  }

  // The only group of an adapter: its sums are in this thread's caches.
  void write_if_alone(const BlockGroup& group, int64_t thread) const {
    if (!adapters_.empty() && adapters_[static_cast<size_t>(group.adapter)].args.groups == 1) {
      GradientArgs args = adapters_[static_cast<size_t>(group.adapter)].args;
      args.sums = sums_of(group, thread);
      table_.write_gradient(args);
    }
  }

  // What is still to be written: gradients of several groups, or of none.
  void add_pieces(std::vector<GradientArgs>& pieces) const {
    constexpr int64_t kColumns = 512;
    for (const Adapter& adapter : adapters_) {
      if (adapter.args.groups != 1) {
        GradientArgs piece = adapter.args;
        piece.sums = reinterpret_cast<const float*>(workspace_.at(adapter.offset));
        for (piece.begin = 0; piece.begin < piece.cols; piece.begin += kColumns) {
          piece.end = std::min(piece.cols, piece.begin + kColumns);
          pieces.push_back(piece);
        }
      }
    }
  }

 private:
  static constexpr int64_t kFloat = sizeof(float);
  struct Adapter {
    GradientArgs args{};
    int64_t offset = 0;
  };

  const Kernels& table_;
  const Workspace& workspace_;
  std::vector<Adapter> adapters_;
  int64_t alone_bytes_ = 0;
  int64_t alone_ = 0;
};

// dA, dB, and dx, which holds dy W already and receives the low-rank part; empty: not wanted.
void low_rank_backward(const Tensor& dy, const Tensor& x, const Tensor& s, const std::vector<Tensor>& lora_a,
                       const std::vector<Tensor>& lora_b, const Kernels& table, Plan& plan, Tensor* dx,
                       const std::vector<Tensor>& da, const std::vector<Tensor>& db) {
  const Team team(plan.rank_rows * (x.size(1) + dy.size(1)));
  const std::vector<BlockGroup> groups = groups_of(plan);
  Workspace workspace;
  Operands operands(table, plan.adapters, workspace);
  if (dx) {
    operands.add_a(lora_a, Along::kRank);
  }
  if (dx || !da.empty()) {
    operands.add_b(lora_b, Along::kColumns);
  }
  const Gradient gradient_a(table, plan, groups, team, da, false, workspace);
  const Gradient gradient_b(table, plan, groups, team, db, true, workspace);
  const int64_t scratch_bytes = table.scratch_bytes(plan.max_rank);
  const int64_t scratch = workspace.reserve(scratch_bytes * team.threads());
  workspace.allocate();
  operands.pack(team);

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
    mine.da = gradient_a.sums_of(group, thread);
    mine.db = gradient_b.sums_of(group, thread);
    mine.scratch = workspace.at(scratch + thread * scratch_bytes);
    table.backward(mine);
    gradient_a.write_if_alone(group, thread);
    gradient_b.write_if_alone(group, thread);
  });
  std::vector<GradientArgs> pieces;
  gradient_a.add_pieces(pieces);
  gradient_b.add_pieces(pieces);
  team.run(static_cast<int64_t>(pieces.size()),
           [&](int64_t task, int64_t) { table.write_gradient(pieces[static_cast<size_t>(task)]); });
}

}  // namespace

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>> lora_linear_backward(
    const Tensor& dy_in, const Tensor& x_in, const Tensor& weight, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& s_in, const Tensor& segments, const Tensor& scaling,
    const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
    const std::optional<Tensor>& layer, bool need_dx, bool need_da, bool need_db,
    const std::optional<Tensor>& packed) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  check_base(x_in, weight, nullptr);
  check_adapters(x_in, weight.size(0), lora_a, lora_b, layout);
  check_gradient(dy_in, x_in, weight.size(0));
  const Kernels& table = kernels(scalar_of(x_in.scalar_type()));
  Plan plan = make_plan(layout, ranks_of(lora_a), x_in.size(0));
  check_intermediate(s_in, x_in, plan.max_rank);
  const Tensor x = dense_rows(x_in);
  const Tensor dy = dense_rows(dy_in);
  const Tensor s = dense_rows(s_in);

  std::vector<Tensor> da = need_da ? empty_gradients(lora_a) : std::vector<Tensor>();
  std::vector<Tensor> db = need_db ? empty_gradients(lora_b) : std::vector<Tensor>();
  Tensor dx = need_dx ? base_linear_dx(dy, weight, pointer(packed)) : empty_cpu({0}, {1}, x.scalar_type());
  low_rank_backward(dy, x, s, lora_a, lora_b, table, plan, need_dx ? &dx : nullptr, da, db);
  return {dx, da, db};
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>> lora_add_backward(
    const Tensor& dy_in, const Tensor& x_in, std::optional<Tensor> dx, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& s_in, const Tensor& segments, const Tensor& scaling,
    const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
    const std::optional<Tensor>& layer, bool need_da, bool need_db) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  MLORA_CHECK(dy_in.dim() == 2, "dy: expected a matrix, got shape ", shape_of(dy_in));
  check_adapters(x_in, dy_in.size(1), lora_a, lora_b, layout);
  check_gradient(dy_in, x_in, dy_in.size(1));
  if (dx) {
    check_product(*dx, "dx", x_in, x_in.size(1));
  }
  Plan plan = make_plan(layout, ranks_of(lora_a), x_in.size(0));
  check_intermediate(s_in, x_in, plan.max_rank);
  const Tensor x = dense_rows(x_in);
  const Tensor dy = dense_rows(dy_in);
  const Tensor s = dense_rows(s_in);

  const Kernels& table = kernels(scalar_of(x.scalar_type()));
  std::vector<Tensor> da = need_da ? empty_gradients(lora_a) : std::vector<Tensor>();
  std::vector<Tensor> db = need_db ? empty_gradients(lora_b) : std::vector<Tensor>();
  low_rank_backward(dy, x, s, lora_a, lora_b, table, plan, dx ? &*dx : nullptr, da, db);
  return {da, db};
}

}  // namespace mlora::cpu
