// The few things that kernels' callers need from torch's stable ABI, without a trip through the dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <string>

#include "check.h"
#include "params.h"

namespace mlora {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const char* dtype_name(ScalarType type) { return torch::headeronly::toString(type); }

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t size : tensor.sizes()) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

inline bool is_scalar(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

inline Scalar scalar_of(ScalarType type) {
  return type == ScalarType::Float  ? Scalar::kFloat
         : type == ScalarType::Half ? Scalar::kHalf
                                    : Scalar::kBFloat16;
}

inline Tensor empty_cpu(std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides,
                        ScalarType type) {
  AtenTensorHandle handle = nullptr;
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(),
                                                  strides.begin(), dtype, aoti_torch_device_type_cpu(), 0,
                                                  &handle));
  return Tensor(handle);
}

inline Tensor empty_cpu(int64_t rows, int64_t cols, ScalarType type) {
  return empty_cpu({rows, cols}, {cols, 1}, type);
}

// A transposed view of a matrix.
inline Tensor transposed(const Tensor& matrix) {
  const int64_t sizes[2] = {matrix.size(1), matrix.size(0)};
  const int64_t strides[2] = {matrix.stride(1), matrix.stride(0)};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(matrix.get(), 2, sizes, strides, 0, &handle));
  return Tensor(handle);
}

// Rows that the kernels can walk: the tensor itself, or a copy when its last dimension is not dense.
inline Tensor dense_rows(const Tensor& matrix) {
  const bool dense = matrix.size(1) == 1 || matrix.stride(1) == 1;
  return dense && (matrix.size(0) <= 1 || matrix.stride(0) >= matrix.size(1))
             ? matrix
             : torch::stable::contiguous(matrix);
}

inline MatrixView view_of(const Tensor& matrix, bool transpose) {
  const int64_t row = matrix.stride(transpose ? 1 : 0);
  const int64_t col = matrix.stride(transpose ? 0 : 1);
  return {matrix.mutable_data_ptr(), row, matrix.size(transpose ? 0 : 1) == 1 ? 1 : col,
          scalar_of(matrix.scalar_type())};
}

}  // namespace mlora
