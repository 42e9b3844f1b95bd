#include <algorithm>

#include "cpu/base_gemm.h"
#include "cpu/lora_linear.h"
#include "cpu/operands.h"
#include "cpu/plan.h"

namespace mlora::cpu {
namespace {

struct Wanted {
  bool dx;
  bool da;
  bool db;
};

// Where the operands that the column tasks broadcast lie in the workspace.
struct Broadcasts {
  int64_t ds_rows = -1;
  int64_t ds_cols = -1;
  int64_t s_cols = -1;
  int64_t ds_rows_stride = 0;
  int64_t cols_stride = 0;
};

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

// One gradient's columns of one adapter.
struct ColumnTask {
  size_t adapter;
  int64_t begin;
  int64_t end;
};

void check_gradient(const Tensor& dy, const Tensor& x, const Tensor& weight) {
  MLORA_CHECK(dy.is_cpu() && dy.dim() == 2 && dy.size(0) == x.size(0) && dy.size(1) == weight.size(0) &&
                  dy.scalar_type() == x.scalar_type(),
              "dy: expected a CPU ", dtype_name(x.scalar_type()), " matrix [", x.size(0), ", ",
              weight.size(0), "], got ", dtype_name(dy.scalar_type()), " of shape ", shape_of(dy));
}

void check_intermediate(const Tensor& s, const Tensor& x, int64_t max_rank) {
  MLORA_CHECK(s.is_cpu() && s.dim() == 2 && s.size(0) == x.size(0) && s.size(1) == max_rank &&
                  s.scalar_type() == x.scalar_type(),
              "s: expected the second output of lora_linear, ", dtype_name(x.scalar_type()), " [", x.size(0),
              ", ", max_rank, "], got ", dtype_name(s.scalar_type()), " of shape ", shape_of(s));
}

// The passes of one backward call: by rows for ds, then by columns for dB, and for dA with dx.
class Backward {
 public:
  Backward(const Tensor& dy, const Tensor& x, const Tensor& s, const std::vector<Tensor>& lora_a,
           const std::vector<Tensor>& lora_b, const Kernels& table, Plan& plan, Wanted wanted)
      : dy_(dy),
        x_(x),
        s_(s),
        lora_a_(lora_a),
        lora_b_(lora_b),
        table_(table),
        plan_(plan),
        wanted_(wanted),
        team_(plan.rank_rows * (x.size(1) + dy.size(1))),
        scratch_bytes_(table.scratch_bytes(plan.max_rank)) {}

  void prepare() {
    Operands operands(table_, plan_.adapters, workspace_);
    if (wanted_.dx) {
      operands.add_a(lora_a_);
    }
    if (wanted_.dx || wanted_.da) {
      operands.add_b(lora_b_);
    }
    reserve_broadcasts();
    scratch_ = workspace_.reserve(scratch_bytes_ * team_.threads());
    workspace_.allocate();
    operands.convert(team_);
  }

  void grad_rows() const {
    GradRowsArgs args{};
    args.dy = dy_.const_data_ptr();
    args.dy_stride = dy_.stride(0);
    args.s = s_.const_data_ptr();
    args.s_stride = s_.stride(0);
    args.d_out = dy_.size(1);
    args.ds_rows = place(places_.ds_rows);
    args.ds_rows_stride = places_.ds_rows_stride;
    args.ds_cols = place(places_.ds_cols);
    args.s_cols = place(places_.s_cols);
    args.cols_stride = places_.cols_stride;
    team_.run(static_cast<int64_t>(plan_.blocks.size()), [&](int64_t task, int64_t thread) {
      GradRowsArgs mine = args;
      mine.block = &plan_.blocks[static_cast<size_t>(task)];
      mine.adapter = &plan_.adapters[static_cast<size_t>(mine.block->adapter)];
      mine.scratch = scratch_of(thread);
      table_.grad_rows(mine);
    });
  }

  void grad_b(std::vector<Tensor>& db) const {
    if (wanted_.db) {
      grad_columns(columns_of_b(), dy_.size(1), db, true);
    }
  }

  // dx holds dy W already and receives the low-rank part.
  void grad_a(Tensor& dx, std::vector<Tensor>& da) const {
    if (wanted_.dx || wanted_.da) {
      grad_columns(columns_of_a(dx), x_.size(1), da, false);
    }
  }

 private:
  void reserve_broadcasts() {
    places_.cols_stride = plan_.max_rank;
    places_.ds_rows_stride = (plan_.max_rank + table_.units - 1) / table_.units;
    if (wanted_.dx || wanted_.da) {
      places_.ds_rows = workspace_.reserve(plan_.rows * places_.ds_rows_stride * 4);
    }
    if (wanted_.da) {
      places_.ds_cols =
          table_.units == 1 ? places_.ds_rows : workspace_.reserve(plan_.pairs * places_.cols_stride * 4);
    }
    if (wanted_.db) {
      places_.s_cols = workspace_.reserve(plan_.pairs * places_.cols_stride * 4);
    }
  }

  // An adapter without rows still has a gradient to fill with zeros.
  void grad_columns(const GradColumnsArgs& args, int64_t columns, std::vector<Tensor>& gradients,
                    bool transpose) const {
    std::vector<ColumnTask> tasks;
    for (size_t i = 0; i < plan_.adapters.size(); ++i) {
      for (int64_t begin = 0; begin < columns && (args.p_cols || plan_.adapters[i].first_block >= 0);
           begin += table_.columns) {
        tasks.push_back({i, begin, std::min(columns, begin + table_.columns)});
      }
    }
    team_.run(static_cast<int64_t>(tasks.size()), [&](int64_t index, int64_t thread) {
      const ColumnTask& task = tasks[static_cast<size_t>(index)];
      GradColumnsArgs mine = args;
      mine.adapter = &plan_.adapters[task.adapter];
      mine.begin = task.begin;
      mine.end = task.end;
      if (mine.p_cols) {
        mine.grad = view_of(gradients[task.adapter], transpose);
      }
      mine.scratch = scratch_of(thread);
      table_.grad_columns(mine);
    });
  }

  GradColumnsArgs columns_of_a(Tensor& dx) const {
    GradColumnsArgs args{};
    args.blocks = plan_.blocks.data();
    args.rows = x_.const_data_ptr();
    args.rows_stride = x_.stride(0);
    args.p_cols = place(places_.ds_cols);
    args.p_stride = places_.cols_stride;
    args.dropout = true;
    args.dx = wanted_.dx ? dx.mutable_data_ptr() : nullptr;
    args.dx_stride = wanted_.dx ? dx.stride(0) : 0;
    args.ds_rows = place(places_.ds_rows);
    args.ds_rows_stride = places_.ds_rows_stride;
    return args;
  }

  GradColumnsArgs columns_of_b() const {
    GradColumnsArgs args{};
    args.blocks = plan_.blocks.data();
    args.rows = dy_.const_data_ptr();
    args.rows_stride = dy_.stride(0);
    args.p_cols = place(places_.s_cols);
    args.p_stride = places_.cols_stride;
    return args;
  }

  char* place(int64_t offset) const { return offset < 0 ? nullptr : workspace_.at(offset); }
  char* scratch_of(int64_t thread) const { return workspace_.at(scratch_ + thread * scratch_bytes_); }

  const Tensor& dy_;
  const Tensor& x_;
  const Tensor& s_;
  const std::vector<Tensor>& lora_a_;
  const std::vector<Tensor>& lora_b_;
  const Kernels& table_;
  Plan& plan_;
  Wanted wanted_;
  Team team_;
  Workspace workspace_;
  Broadcasts places_;
  int64_t scratch_bytes_;
  int64_t scratch_ = 0;
};

}  // namespace

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>> lora_linear_backward(
    const Tensor& dy_in, const Tensor& x_in, const Tensor& weight, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& s_in, const Tensor& segments, const Tensor& scaling,
    const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
    const std::optional<Tensor>& layer, bool need_dx, bool need_da, bool need_db) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  check_arguments(x_in, weight, nullptr, lora_a, lora_b, layout);
  check_gradient(dy_in, x_in, weight);
  const Kernels& table = kernels(scalar_of(x_in.scalar_type()));
  Plan plan = make_plan(layout, ranks_of(lora_a), x_in.size(0), table.units);
  check_intermediate(s_in, x_in, plan.max_rank);
  const Tensor x = dense_rows(x_in);
  const Tensor dy = dense_rows(dy_in);
  const Tensor s = dense_rows(s_in);

  Backward backward(dy, x, s, lora_a, lora_b, table, plan, {need_dx, need_da, need_db});
  backward.prepare();
  backward.grad_rows();
  // before the product with W, which drives dy out of the caches
  std::vector<Tensor> db = need_db ? empty_gradients(lora_b) : std::vector<Tensor>();
  backward.grad_b(db);
  Tensor dx = need_dx ? base_linear_dx(dy, weight) : empty_cpu({0}, {1}, x.scalar_type());
  std::vector<Tensor> da = need_da ? empty_gradients(lora_a) : std::vector<Tensor>();
  backward.grad_a(dx, da);
  return {dx, da, db};
}

}  // namespace mlora::cpu
