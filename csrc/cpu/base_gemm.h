// The frozen layer's own product, by one of the vendors' libraries that torch carries.
#pragma once

#include <string>

#include "tensors.h"

namespace mlora::cpu {

enum class BaseGemm : int8_t { kAten, kOneDnn };

// The library in use for this dtype: measured at the first question, unless it was set.
BaseGemm base_gemm(ScalarType type);
std::string base_gemm_name(ScalarType type);
void set_base_gemm(ScalarType type, const std::string& name);

// x weight^T + bias and dy weight; fresh, contiguous results. `packed`, if any, holds the same numbers as
// weight, or as its transpose for dx, in oneDNN's own layout: then the product is oneDNN's.
Tensor base_linear(const Tensor& x, const Tensor& weight, const Tensor* bias, const Tensor* packed);
Tensor base_linear_dx(const Tensor& dy, const Tensor& weight, const Tensor* packed);

}  // namespace mlora::cpu
