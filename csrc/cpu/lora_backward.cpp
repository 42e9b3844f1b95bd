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

// The two passes of one backward call, before and after the product with W.
class Backward {
 public:
  Backward(const Tensor& dy, const Tensor& x, const Tensor& s, const Kernels& table, Plan& plan,
           Wanted wanted)
      : dy_(dy),
        x_(x),
        s_(s),
        table_(table),
        plan_(plan),
        wanted_(wanted),
        team_(plan.rank_rows * (x.size(1) + dy.size(1))),
        scratch_bytes_(table.scratch_bytes(plan.max_rank)),
        ds_stride_((plan.max_rank + table.units - 1) / table.units) {}

  void prepare(const std::vector<Tensor>& lora_a, const std::vector<Tensor>& lora_b) {
    Operands operands(table_, plan_.adapters, workspace_);
    if (wanted_.dx) {
      operands.add_a(lora_a);
    }
    if (wanted_.dx || wanted_.da) {
      operands.add_b(lora_b);
      ds_ = workspace_.reserve(plan_.rows * ds_stride_ * 4);
    }
    scratch_ = workspace_.reserve(scratch_bytes_ * team_.threads());
    workspace_.allocate();
    operands.convert(team_);
  }

  // ds by blocks of rows, and dB by columns: neither needs the other.
  void read_dy(std::vector<Tensor>& db) const {
    GradRowsArgs rows{};
    rows.dy = dy_.const_data_ptr();
    rows.dy_stride = dy_.stride(0);
    rows.d_out = dy_.size(1);
    rows.ds = ds();
    rows.ds_stride = ds_stride_;
    GradBArgs columns{};
    columns.blocks = plan_.blocks.data();
    columns.dy = rows.dy;
    columns.dy_stride = rows.dy_stride;
    columns.s = s_.const_data_ptr();
    columns.s_stride = s_.stride(0);
    const size_t blocks = rows.ds ? plan_.blocks.size() : 0;
    const std::vector<ColumnTask> tasks =
        wanted_.db ? column_tasks(dy_.size(1), true) : std::vector<ColumnTask>();
    team_.run(static_cast<int64_t>(blocks + tasks.size()), [&](int64_t task, int64_t thread) {
      const size_t index = static_cast<size_t>(task);
      if (index < blocks) {
        GradRowsArgs mine = rows;
        mine.block = &plan_.blocks[index];
        mine.adapter = &plan_.adapters[static_cast<size_t>(mine.block->adapter)];
        mine.scratch = scratch_of(thread);
        table_.grad_rows(mine);
      } else {
        GradBArgs mine = columns;
        take(tasks[index - blocks], thread, mine);
        mine.grad = view_of(db[tasks[index - blocks].adapter], true);
        table_.grad_b(mine);
      }
    });
  }

  // dA, and dx, which holds dy W already and receives the low-rank part.
  void read_x(Tensor& dx, std::vector<Tensor>& da) const {
    GradAArgs columns{};
    columns.blocks = plan_.blocks.data();
    columns.x = x_.const_data_ptr();
    columns.x_stride = x_.stride(0);
    columns.ds = ds();
    columns.ds_stride = ds_stride_;
    if (wanted_.dx) {
      columns.dx = dx.mutable_data_ptr();
      columns.dx_stride = dx.stride(0);
    }
    const std::vector<ColumnTask> tasks =
        wanted_.dx || wanted_.da ? column_tasks(x_.size(1), wanted_.da) : std::vector<ColumnTask>();
    team_.run(static_cast<int64_t>(tasks.size()), [&](int64_t task, int64_t thread) {
      const size_t index = static_cast<size_t>(task);
      GradAArgs mine = columns;
      take(tasks[index], thread, mine);
      if (wanted_.da) {
        mine.grad = view_of(da[tasks[index].adapter], false);
      }
      table_.grad_a(mine);
    });
  }

 private:
  // An adapter without rows still has a gradient to fill with zeros.
  std::vector<ColumnTask> column_tasks(int64_t columns, bool gradient) const {
    std::vector<ColumnTask> tasks;
    tasks.reserve(plan_.adapters.size() * static_cast<size_t>(columns / table_.columns + 1));
    for (size_t i = 0; i < plan_.adapters.size(); ++i) {
      for (int64_t begin = 0; begin < columns && (gradient || plan_.adapters[i].first_block >= 0);
           begin += table_.columns) {
        tasks.push_back({i, begin, std::min(columns, begin + table_.columns)});
      }
    }
    return tasks;
  }

  template <typename Args>
  void take(const ColumnTask& task, int64_t thread, Args& args) const {
    args.adapter = &plan_.adapters[task.adapter];
    args.begin = task.begin;
    args.end = task.end;
    args.scratch = scratch_of(thread);
  }

  char* ds() const { return ds_ < 0 ? nullptr : workspace_.at(ds_); }
  char* scratch_of(int64_t thread) const { return workspace_.at(scratch_ + thread * scratch_bytes_); }

  const Tensor& dy_;
  const Tensor& x_;
  const Tensor& s_;
  const Kernels& table_;
  Plan& plan_;
  Wanted wanted_;
  Team team_;
  Workspace workspace_;
  int64_t scratch_bytes_;
  int64_t scratch_ = 0;
  int64_t ds_stride_;
  int64_t ds_ = -1;
};

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

  Backward backward(dy, x, s, table, plan, {need_dx, need_da, need_db});
  backward.prepare(lora_a, lora_b);
  std::vector<Tensor> db = need_db ? empty_gradients(lora_b) : std::vector<Tensor>();
  // before the product with W, which drives dy out of the caches
  backward.read_dy(db);
  Tensor dx = need_dx ? base_linear_dx(dy, weight, pointer(packed)) : empty_cpu({0}, {1}, x.scalar_type());
  std::vector<Tensor> da = need_da ? empty_gradients(lora_a) : std::vector<Tensor>();
  backward.read_x(dx, da);
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
  Backward backward(dy, x, s, table, plan, {dx.has_value(), need_da, need_db});
  backward.prepare(lora_a, lora_b);
  std::vector<Tensor> db = need_db ? empty_gradients(lora_b) : std::vector<Tensor>();
  backward.read_dy(db);
  std::vector<Tensor> da = need_da ? empty_gradients(lora_a) : std::vector<Tensor>();
  Tensor unused = empty_cpu({0}, {1}, x.scalar_type());
  backward.read_x(dx ? *dx : unused, da);
  return {da, db};
}

}  // namespace mlora::cpu
