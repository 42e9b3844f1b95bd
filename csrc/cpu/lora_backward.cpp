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

Broadcasts reserve_broadcasts(const Kernels& table, const Plan& plan, Wanted wanted, Workspace& workspace) {
  Broadcasts places;
  places.cols_stride = plan.max_rank;
  places.ds_rows_stride = (plan.max_rank + table.units - 1) / table.units;
  if (wanted.dx || wanted.da) {
    places.ds_rows = workspace.reserve(plan.rows * places.ds_rows_stride * 4);
  }
  if (wanted.da) {
    places.ds_cols =
        table.units == 1 ? places.ds_rows : workspace.reserve(plan.pairs * places.cols_stride * 4);
  }
  if (wanted.db) {
    places.s_cols = workspace.reserve(plan.pairs * places.cols_stride * 4);
  }
  return places;
}

std::vector<Tensor> empty_gradients(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const Tensor& parameter : parameters) {
    gradients.push_back(empty_cpu({parameter.size(0), parameter.size(1)},
                                  {parameter.stride(0), parameter.stride(1)}, parameter.scalar_type()));
  }
  return gradients;
}

// One gradient's columns of one adapter.
struct ColumnTask {
  int32_t adapter;
  bool is_a;
  int64_t begin;
  int64_t end;
};

void add_tasks(const Kernels& table, const Plan& plan, bool is_a, int64_t columns, bool gradient,
               std::vector<ColumnTask>& tasks) {
  for (size_t i = 0; i < plan.adapters.size(); ++i) {
    if (!gradient && plan.adapters[i].first_block < 0) {
      continue;
    }
    for (int64_t begin = 0; begin < columns; begin += table.columns) {
      tasks.push_back({static_cast<int32_t>(i), is_a, begin, std::min(columns, begin + table.columns)});
    }
  }
}

}  // namespace

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>> lora_linear_backward(
    const Tensor& dy_in, const Tensor& x_in, const Tensor& weight, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& s_in, const Tensor& segments, const Tensor& scaling,
    const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
    const std::optional<Tensor>& layer, bool need_dx, bool need_da, bool need_db) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  check_arguments(x_in, weight, nullptr, lora_a, lora_b, layout);
  MLORA_CHECK(dy_in.is_cpu() && dy_in.dim() == 2 && dy_in.size(0) == x_in.size(0) &&
                  dy_in.size(1) == weight.size(0) && dy_in.scalar_type() == x_in.scalar_type(),
              "dy: expected a CPU ", dtype_name(x_in.scalar_type()), " matrix [", x_in.size(0), ", ",
              weight.size(0), "], got ", dtype_name(dy_in.scalar_type()), " of shape ", shape_of(dy_in));
  const Tensor x = dense_rows(x_in);
  const Tensor dy = dense_rows(dy_in);
  const Kernels& table = kernels(scalar_of(x.scalar_type()));
  Plan plan = make_plan(layout, ranks_of(lora_a), x.size(0), table.units);
  MLORA_CHECK(s_in.is_cpu() && s_in.dim() == 2 && s_in.size(0) == plan.rows &&
                  s_in.size(1) == plan.max_rank && s_in.scalar_type() == x.scalar_type(),
              "s: expected the second output of lora_linear, ", dtype_name(x.scalar_type()), " [", plan.rows,
              ", ", plan.max_rank, "], got ", dtype_name(s_in.scalar_type()), " of shape ", shape_of(s_in));
  const Tensor s = dense_rows(s_in);
  const Wanted wanted{need_dx, need_da, need_db};

  const Team team(plan.rank_rows * (x.size(1) + dy.size(1)));
  Workspace workspace;
  Operands a_cols(table, lora_a, false, plan);
  Operands b_rows(table, lora_b, true, plan);
  if (wanted.dx) {
    a_cols.reserve(true, workspace);
  }
  if (wanted.dx || wanted.da) {
    b_rows.reserve(false, workspace);
  }
  const Broadcasts places = reserve_broadcasts(table, plan, wanted, workspace);
  const int64_t scratch_bytes = table.scratch_bytes(plan.max_rank);
  const int64_t scratch = workspace.reserve(scratch_bytes * team.threads());
  workspace.allocate();
  a_cols.resolve(workspace, [&](size_t i, const void* data, int64_t stride) {
    plan.adapters[i].a_cols = data;
    plan.adapters[i].a_cols_stride = stride;
  });
  b_rows.resolve(workspace, [&](size_t i, const void* data, int64_t stride) {
    plan.adapters[i].b_rows = data;
    plan.adapters[i].b_rows_stride = stride;
  });
  a_cols.pack(team);
  b_rows.pack(team);

  const auto place = [&](int64_t offset) { return offset < 0 ? nullptr : workspace.at(offset); };
  GradRowsArgs rows{};
  rows.dy = dy.const_data_ptr();
  rows.dy_stride = dy.stride(0);
  rows.s = s.const_data_ptr();
  rows.s_stride = s.stride(0);
  rows.d_out = dy.size(1);
  rows.ds_rows = place(places.ds_rows);
  rows.ds_rows_stride = places.ds_rows_stride;
  rows.ds_cols = place(places.ds_cols);
  rows.s_cols = place(places.s_cols);
  rows.cols_stride = places.cols_stride;
  team.run(static_cast<int64_t>(plan.blocks.size()), [&](int64_t task, int64_t thread) {
    GradRowsArgs mine = rows;
    mine.block = &plan.blocks[static_cast<size_t>(task)];
    mine.adapter = &plan.adapters[static_cast<size_t>(mine.block->adapter)];
    mine.scratch = workspace.at(scratch + thread * scratch_bytes);
    table.grad_rows(mine);
  });

  Tensor dx = wanted.dx ? base_linear_dx(dy, weight) : empty_cpu({0}, {1}, x.scalar_type());
  std::vector<Tensor> da = wanted.da ? empty_gradients(lora_a) : std::vector<Tensor>();
  std::vector<Tensor> db = wanted.db ? empty_gradients(lora_b) : std::vector<Tensor>();
  std::vector<ColumnTask> tasks;
  if (wanted.dx || wanted.da) {
    add_tasks(table, plan, true, x.size(1), wanted.da, tasks);
  }
  if (wanted.db) {
    add_tasks(table, plan, false, dy.size(1), true, tasks);
  }

  GradColumnsArgs of_a{};
  of_a.blocks = plan.blocks.data();
  of_a.rows = x.const_data_ptr();
  of_a.rows_stride = x.stride(0);
  of_a.p_cols = place(places.ds_cols);
  of_a.p_stride = places.cols_stride;
  of_a.dropout = true;
  of_a.dx = wanted.dx ? dx.mutable_data_ptr() : nullptr;
  of_a.dx_stride = wanted.dx ? dx.stride(0) : 0;
  of_a.ds_rows = rows.ds_rows;
  of_a.ds_rows_stride = places.ds_rows_stride;
  GradColumnsArgs of_b{};
  of_b.blocks = plan.blocks.data();
  of_b.rows = dy.const_data_ptr();
  of_b.rows_stride = dy.stride(0);
  of_b.p_cols = place(places.s_cols);
  of_b.p_stride = places.cols_stride;
  team.run(static_cast<int64_t>(tasks.size()), [&](int64_t index, int64_t thread) {
    const ColumnTask& task = tasks[static_cast<size_t>(index)];
    const size_t i = static_cast<size_t>(task.adapter);
    GradColumnsArgs mine = task.is_a ? of_a : of_b;
    mine.adapter = &plan.adapters[i];
    mine.begin = task.begin;
    mine.end = task.end;
    if (mine.p_cols) {
      mine.grad = task.is_a ? view_of(da[i], false) : view_of(db[i], true);
    }
    mine.scratch = workspace.at(scratch + thread * scratch_bytes);
    table.grad_columns(mine);
  });
  return {dx, da, db};
}

}  // namespace mlora::cpu
