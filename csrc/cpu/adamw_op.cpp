#include "cpu/adamw_op.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cpu/plan.h"

namespace mlora::cpu {
namespace {

constexpr int64_t kSpan = 1 << 14;  // numbers of one task

void check_state(const Tensor& state, const char* name, const Tensor& gradient) {
  MLORA_CHECK(state.scalar_type() == ScalarType::Float && state.is_contiguous(), name,
              ": expected a contiguous Float tensor, got ", dtype_name(state.scalar_type()));
  MLORA_CHECK(state.numel() == gradient.numel(), name, ": expected ", gradient.numel(),
              " numbers (as many as the gradient has), got ", state.numel());
}

}  // namespace

double adamw(const Tensor& gradient, const Tensor& parameter, const Tensor& first, const Tensor& second,
             const std::optional<Tensor>& copy, double lr, double beta1, double beta2, double eps,
             double weight_decay, int64_t step, double scale, int64_t threads) {
  MLORA_CHECK(is_scalar(gradient.scalar_type()) && gradient.is_contiguous(),
              "gradient: expected a contiguous Float, BFloat16 or Half tensor, got ",
              dtype_name(gradient.scalar_type()));
  check_state(parameter, "parameter", gradient);
  check_state(first, "first", gradient);
  check_state(second, "second", gradient);
  MLORA_CHECK(
      !copy || (is_scalar(copy->scalar_type()) && copy->is_contiguous() && copy->numel() == gradient.numel()),
      "copy: expected a contiguous Float, BFloat16 or Half tensor of ", gradient.numel(), " numbers, got ",
      dtype_name(copy->scalar_type()), " of ", copy->numel());
  MLORA_CHECK(step >= 1, "step: expected at least 1, got ", step);
  MLORA_CHECK(threads >= 0, "threads: expected at least 0 (0 = torch's), got ", threads);
  const double count = static_cast<double>(step);
  const AdamWArgs args{
      .gradient = gradient.mutable_data_ptr(),
      .parameter = static_cast<float*>(parameter.mutable_data_ptr()),
      .first = static_cast<float*>(first.mutable_data_ptr()),
      .second = static_cast<float*>(second.mutable_data_ptr()),
      .copy = copy ? copy->mutable_data_ptr() : nullptr,
      .copy_type = copy ? scalar_of(copy->scalar_type()) : Scalar::kFloat,
      .scale = static_cast<float>(scale),
      .beta1 = static_cast<float>(beta1),
      .beta2 = static_cast<float>(beta2),
      .keep = static_cast<float>(1.0 - lr * weight_decay),
      .step_size = static_cast<float>(lr / (1.0 - std::pow(beta1, count))),
      .root = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, count))),
      .eps = static_cast<float>(eps),
  };
  const Kernels& table = kernels(scalar_of(gradient.scalar_type()));
  const int64_t numbers = gradient.numel();
  const int64_t spans = (numbers + kSpan - 1) / kSpan;
  std::vector<float> squares(spans);
  const Team team(numbers, threads);
  team.run(spans, [&](int64_t task, int64_t) {
    squares[task] = table.adamw(args, task * kSpan, std::min(numbers, (task + 1) * kSpan));
  });
  return std::accumulate(squares.begin(), squares.end(), 0.0);
}

}  // namespace mlora::cpu
