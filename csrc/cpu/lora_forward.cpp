#include <algorithm>
#include <cstring>

#include "cpu/base_gemm.h"
#include "cpu/lora_linear.h"
#include "cpu/operands.h"
#include "cpu/plan.h"

namespace mlora::cpu {
namespace {

const Tensor* pointer(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

// The number of each adapter's blocks.
std::vector<int32_t> blocks_of(const Plan& plan) {
  std::vector<int32_t> blocks(plan.adapters.size());
  for (const RowBlock& block : plan.blocks) {
    ++blocks[static_cast<size_t>(block.adapter)];
  }
  return blocks;
}

// s is zero on rows that no adapter has.
void zero_other_rows(const Plan& plan, Tensor& s) {
  const int64_t row_bytes = s.size(1) * static_cast<int64_t>(s.element_size());
  char* data = static_cast<char*>(s.mutable_data_ptr());
  int64_t cursor = 0;
  const auto zero_until = [&](int64_t row) {
    if (row > cursor) {
      std::memset(data + cursor * row_bytes, 0, static_cast<size_t>((row - cursor) * row_bytes));
    }
  };
  for (const RowBlock& block : plan.blocks) {
    zero_until(block.begin);
    cursor = block.begin + block.rows;
  }
  zero_until(plan.rows);
}

// s = scaling drop(x) A^T, and y += s B^T, row block by row block. Returns s.
Tensor add_low_rank(const Tensor& y, const Tensor& x, const Adapters& adapters, const Layout& layout) {
  const Kernels& table = kernels(scalar_of(x.scalar_type()));
  Plan plan = make_plan(layout, adapters.ranks, x.size(0));
  Tensor s = empty_cpu(plan.rows, plan.max_rank, x.scalar_type());
  zero_other_rows(plan, s);

  const Team team(plan.rank_rows * (x.size(1) + y.size(1)));
  Workspace workspace;
  const std::vector<int32_t> tasks = blocks_of(plan);
  Operands operands(table, plan.adapters, tasks, workspace);
  operands.add_a(adapters.a, x.size(1), Along::kColumns);
  operands.add_b(adapters.b, y.size(1), Along::kRank);
  const int64_t threads = std::clamp<int64_t>(static_cast<int64_t>(plan.blocks.size()), 1, team.threads());
  operands.reserve(threads);
  const int64_t scratch_bytes = table.scratch_bytes(plan.max_rank);
  const int64_t scratch = workspace.reserve(scratch_bytes * threads);
  workspace.allocate();
  operands.pack_shared(team);

  ForwardArgs args{};
  args.x = x.const_data_ptr();
  args.x_stride = x.stride(0);
  args.y = y.mutable_data_ptr();
  args.y_stride = y.stride(0);
  args.s = s.mutable_data_ptr();
  args.s_stride = plan.max_rank;
  args.d_in = x.size(1);
  args.d_out = y.size(1);
  team.run(static_cast<int64_t>(plan.blocks.size()), [&](int64_t task, int64_t thread) {
    ForwardArgs mine = args;
    mine.block = &plan.blocks[static_cast<size_t>(task)];
    mine.adapter = &plan.adapters[static_cast<size_t>(mine.block->adapter)];
    mine.scratch = workspace.at(scratch + thread * scratch_bytes);
    operands.pack_alone(mine.block->adapter, thread);
    table.forward(mine);
  });
  return s;
}

}  // namespace

std::tuple<Tensor, Tensor> lora_linear(const Tensor& x_in, const Tensor& weight,
                                       const std::optional<Tensor>& bias, const std::vector<Tensor>& lora_a,
                                       const std::vector<Tensor>& lora_b, const Tensor& segments,
                                       const Tensor& scaling, const std::optional<Tensor>& dropout_p,
                                       const std::optional<Tensor>& dropout_rng,
                                       const std::optional<Tensor>& layer,
                                       const std::optional<Tensor>& packed) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  check_base(x_in, weight, pointer(bias));
  check_adapters(x_in, weight.size(0), lora_a, lora_b, layout);
  const Tensor x = dense_rows(x_in);
  Tensor y = base_linear(x, weight, pointer(bias), pointer(packed));
  Tensor s = add_low_rank(y, x, adapters_of(lora_a, lora_b), layout);
  return {y, s};
}

std::tuple<Tensor, Tensor> lora_linear_table(const Tensor& x_in, const Tensor& weight,
                                             const std::optional<Tensor>& bias,
                                             const std::optional<Tensor>& packed, const Tensor& a,
                                             const Tensor& a_table, const Tensor& b, const Tensor& b_table,
                                             const Tensor& segments, const Tensor& scaling,
                                             const std::optional<Tensor>& dropout_p,
                                             const std::optional<Tensor>& dropout_rng,
                                             const std::optional<Tensor>& layer) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  check_base(x_in, weight, pointer(bias));
  check_layout(layout, a_table.size(0));
  const Tensor x = dense_rows(x_in);
  Tensor y = base_linear(x, weight, pointer(bias), pointer(packed));
  Tensor s = add_low_rank(y, x, adapters_of(a, a_table, b, b_table), layout);
  return {y, s};
}

Tensor lora_add(const Tensor& x_in, Tensor y, const std::vector<Tensor>& lora_a,
                const std::vector<Tensor>& lora_b, const Tensor& segments, const Tensor& scaling,
                const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
                const std::optional<Tensor>& layer) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  check_product(y, "y", x_in, -1);
  check_adapters(x_in, y.size(1), lora_a, lora_b, layout);
  return add_low_rank(y, dense_rows(x_in), adapters_of(lora_a, lora_b), layout);
}

Tensor lora_add_table(const Tensor& x, Tensor y, const Tensor& a, const Tensor& a_table, const Tensor& b,
                      const Tensor& b_table, const Tensor& segments, const Tensor& scaling,
                      const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
                      const std::optional<Tensor>& layer) {
  const Layout layout{segments, scaling, pointer(dropout_p), pointer(dropout_rng), pointer(layer)};
  check_product(y, "y", x, -1);
  check_layout(layout, a_table.size(0));
  return add_low_rank(y, dense_rows(x), adapters_of(a, a_table, b, b_table), layout);
}

}  // namespace mlora::cpu
