#include "cpu/adamw_op.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "cpu/plan.h"

namespace mlora::cpu {
namespace {

constexpr int64_t kSpan = 1 << 14;  // numbers of one task
// What a number takes, in the multiply-adds by which `Team` decides on threads: these wait for memory.
constexpr int64_t kUpdateWork = 8;
constexpr int64_t kSquareWork = 4;

// Numbers [begin, end) of one tensor of a list.
struct Span {
  size_t tensor;
  int64_t begin;
  int64_t end;
};

std::string name_of(const char* list, size_t i) { return std::string(list) + "[" + std::to_string(i) + "]"; }

// Whether the tensor's numbers lie without gaps, in any order of its dimensions.
bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return true;
  }
  std::vector<std::pair<int64_t, int64_t>> dimensions;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) != 1) {
      dimensions.emplace_back(tensor.stride(i), tensor.size(i));
    }
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t next = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride != next) {
      return false;
    }
    next *= size;
  }
  return true;
}

void check_numbers(const Tensor& tensor, const char* list, size_t i) {
  MLORA_CHECK(tensor.is_cpu() && is_scalar(tensor.scalar_type()) && is_dense(tensor), name_of(list, i),
              ": expected a dense CPU Float, BFloat16 or Half tensor, got ", dtype_name(tensor.scalar_type()),
              " of shape ", shape_of(tensor));
}

// As dense as the gradient, whose numbers lie in the same order.
void check_beside(const Tensor& tensor, const char* list, size_t i, const Tensor& gradient) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const bool same = std::equal(sizes.begin(), sizes.end(), gradient.sizes().begin(), gradient.sizes().end());
  MLORA_CHECK(same && (gradient.is_contiguous()
                           ? tensor.is_contiguous()
                           : std::equal(strides.begin(), strides.end(), gradient.strides().begin())),
              name_of(list, i), ": expected shape ", shape_of(gradient),
              " and the strides of the gradient, got ", shape_of(tensor));
}

void check_state(const std::vector<Tensor>& list, const char* name, const std::vector<Tensor>& gradients) {
  MLORA_CHECK(list.size() == gradients.size(), name, ": expected ", gradients.size(),
              " (one for each gradient), got ", list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    MLORA_CHECK(list[i].is_cpu() && list[i].scalar_type() == ScalarType::Float, name_of(name, i),
                ": expected a CPU Float tensor, got ", dtype_name(list[i].scalar_type()));
    check_beside(list[i], name, i, gradients[i]);
  }
}

// Sums what `task` returns for each span of the tensors, in their order, so it depends on no thread. `work`:
// of a number, in multiply-adds.
template <typename Task>
double sum_of_spans(const std::vector<Tensor>& tensors, int64_t work, int64_t threads, const Task& task) {
  std::vector<Span> spans;
  int64_t numbers = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t count = tensors[i].numel();
    numbers += count;
    for (int64_t begin = 0; begin < count; begin += kSpan) {
      spans.push_back({i, begin, std::min(count, begin + kSpan)});
    }
  }
  std::vector<float> sums(spans.size());
  Team(work * numbers, threads).run(static_cast<int64_t>(spans.size()), [&](int64_t i, int64_t) {
    sums[static_cast<size_t>(i)] = task(spans[static_cast<size_t>(i)]);
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace

double adamw(const std::vector<Tensor>& gradients, const std::vector<Tensor>& parameters,
             const std::vector<Tensor>& first, const std::vector<Tensor>& second,
             const std::vector<Tensor>& copies, double lr, double beta1, double beta2, double eps,
             double weight_decay, int64_t step, double scale, bool clear, int64_t threads) {
  for (size_t i = 0; i < gradients.size(); ++i) {
    check_numbers(gradients[i], "gradients", i);
  }
  check_state(parameters, "parameters", gradients);
  check_state(first, "first", gradients);
  check_state(second, "second", gradients);
  MLORA_CHECK(copies.empty() || copies.size() == gradients.size(), "copies: expected none or ",
              gradients.size(), " (one for each gradient), got ", copies.size());
  for (size_t i = 0; i < copies.size(); ++i) {
    MLORA_CHECK(copies[i].is_cpu() && is_scalar(copies[i].scalar_type()), name_of("copies", i),
                ": expected a CPU Float, BFloat16 or Half tensor, got ", dtype_name(copies[i].scalar_type()));
    check_beside(copies[i], "copies", i, gradients[i]);
  }
  MLORA_CHECK(step >= 1, "step: expected at least 1, got ", step);
  MLORA_CHECK(threads >= 0, "threads: expected at least 0 (0 = torch's), got ", threads);
  const double count = static_cast<double>(step);
  AdamWArgs values{};
  values.scale = static_cast<float>(scale);
  values.beta1 = static_cast<float>(beta1);
  values.beta2 = static_cast<float>(beta2);
  values.keep = static_cast<float>(1.0 - lr * weight_decay);
  values.step_size = static_cast<float>(lr / (1.0 - std::pow(beta1, count)));
  values.root = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, count)));
  values.eps = static_cast<float>(eps);
  values.clear = clear;
  std::vector<AdamWArgs> args(gradients.size(), values);
  for (size_t i = 0; i < gradients.size(); ++i) {
    args[i].gradient = gradients[i].mutable_data_ptr();
    args[i].parameter = static_cast<float*>(parameters[i].mutable_data_ptr());
    args[i].first = static_cast<float*>(first[i].mutable_data_ptr());
    args[i].second = static_cast<float*>(second[i].mutable_data_ptr());
    if (!copies.empty()) {
      args[i].copy = copies[i].mutable_data_ptr();
      args[i].copy_type = scalar_of(copies[i].scalar_type());
    }
  }
  return sum_of_spans(gradients, kUpdateWork, threads, [&](const Span& span) {
    return kernels(scalar_of(gradients[span.tensor].scalar_type()))
        .adamw(args[span.tensor], span.begin, span.end);
  });
}

double squares(const std::vector<Tensor>& tensors, int64_t threads) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_numbers(tensors[i], "tensors", i);
  }
  return sum_of_spans(tensors, kSquareWork, threads, [&](const Span& span) {
    const Tensor& tensor = tensors[span.tensor];
    return kernels(scalar_of(tensor.scalar_type())).squares(tensor.const_data_ptr(), span.begin, span.end);
  });
}

}  // namespace mlora::cpu
