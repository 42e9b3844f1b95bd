// The operator `adamw`: an AdamW update in place on a CPU.
#pragma once

#include <optional>

#include "tensors.h"

namespace mlora::cpu {

// The gradient may be of any supported dtype; states are fp32; `copy` receives the new parameter in its own
// dtype. `threads`: at most so many; 0 = torch's. Returns the sum of the squares of the unscaled gradient,
// which is the same for any number of threads.
double adamw(const Tensor& gradient, const Tensor& parameter, const Tensor& first, const Tensor& second,
             const std::optional<Tensor>& copy, double lr, double beta1, double beta2, double eps,
             double weight_decay, int64_t step, double scale, int64_t threads);

}  // namespace mlora::cpu
