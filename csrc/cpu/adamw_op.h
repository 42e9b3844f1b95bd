// The operators `adamw`, an AdamW update in place of many tensors at once on a CPU, and `squares`.
#pragma once

#include <vector>

#include "tensors.h"

namespace mlora::cpu {

// One for each gradient: a parameter and its moments, fp32, and perhaps a copy, which receives the new
// parameter in its own dtype; all of one shape, with the same strides, without gaps. Gradients may be of any
// supported dtype; `clear` leaves zeros in them. `threads`: at most so many; 0 = torch's. Returns the sum of
// the squares of the unscaled gradients, which is the same for any number of threads.
double adamw(const std::vector<Tensor>& gradients, const std::vector<Tensor>& parameters,
             const std::vector<Tensor>& first, const std::vector<Tensor>& second,
             const std::vector<Tensor>& copies, double lr, double beta1, double beta2, double eps,
             double weight_decay, int64_t step, double scale, bool clear, int64_t threads);

// The sum of the squares of dense tensors, the same for any number of threads.
double squares(const std::vector<Tensor>& tensors, int64_t threads);

}  // namespace mlora::cpu
