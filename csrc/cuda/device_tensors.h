// What the launchers need of torch's tensors on a device: checks, the queue, views for the kernels.
#pragma once

#include <array>
#include <optional>

#include "cuda/kernels.h"
#include "tensors.h"
#ifdef MLORA_EMULATE
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#endif

// Weak: a CPU-only torch does not have them, and this library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cuda_addmm_out(AtenTensorHandle out,
                                                                          AtenTensorHandle self,
                                                                          AtenTensorHandle mat1,
                                                                          AtenTensorHandle mat2, double beta,
                                                                          double alpha);

namespace mlora::cuda {

#ifdef MLORA_EMULATE
inline bool on_device(const Tensor& tensor) { return tensor.is_cpu(); }
inline Queue queue_of(const Tensor&) { return {nullptr, 0}; }
#else
inline bool on_device(const Tensor& tensor) { return tensor.is_cuda(); }
inline Queue queue_of(const Tensor& tensor) {
  MLORA_CHECK(aoti_torch_get_current_cuda_stream, "this torch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return {stream, tensor.get_device_index()};
}
#endif

// A contiguous tensor of a dtype and number of dimensions on the device.
inline void check_dense(const Tensor& tensor, const char* name, int64_t dimensions, ScalarType type) {
  MLORA_CHECK(on_device(tensor) && tensor.dim() == dimensions && tensor.scalar_type() == type &&
                  tensor.is_contiguous(),
              name, ": expected a contiguous ", dtype_name(type), " tensor of ", dimensions,
              " dimensions on the device, got ", dtype_name(tensor.scalar_type()), " of shape ",
              shape_of(tensor));
}

inline void check_table(const Tensor& tensor, const char* name, int64_t columns, ScalarType type) {
  check_dense(tensor, name, 2, type);
  MLORA_CHECK(tensor.size(1) == columns, name, ": expected ", columns, " columns, got shape ",
              shape_of(tensor));
}

inline bool is_aligned(const void* data, int64_t stride, size_t number_size) {
  const int64_t row_bytes = stride * static_cast<int64_t>(number_size);
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_bytes % 16 == 0 && row_bytes < 1 << 25;
}

inline void check_rows(const Tensor& matrix, const char* name, int64_t rows, int64_t columns,
                       ScalarType type) {
  MLORA_CHECK(on_device(matrix) && matrix.dim() == 2 && matrix.size(0) == rows && matrix.size(1) == columns &&
                  matrix.scalar_type() == type && (columns == 1 || matrix.stride(1) == 1),
              name, ": expected ", dtype_name(type), " rows of shape [", rows, ", ", columns,
              "], dense within a row, on the device; got ", dtype_name(matrix.scalar_type()), " of shape ",
              shape_of(matrix));
  MLORA_CHECK(rows <= INT32_MAX && columns <= INT32_MAX, name, ": too large, ", shape_of(matrix));
}

// A matrix of rows at any distance, whose numbers are dense within a row.
inline Rows rows_of(const Tensor& matrix) {
  const void* data = matrix.const_data_ptr();
  return {data, matrix.stride(0), is_aligned(data, matrix.stride(0), matrix.element_size())};
}

inline OutRows out_rows_of(const Tensor& matrix) {
  void* data = matrix.mutable_data_ptr();
  return {data, matrix.stride(0), is_aligned(data, matrix.stride(0), matrix.element_size())};
}

inline Tensor empty_like_device(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  std::array<int64_t, 4> strides{};
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes.begin()[i];
  }
  AtenTensorHandle handle = nullptr;
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(),
                                                  strides.data(), dtype, device_type, like.get_device_index(),
                                                  &handle));
  return Tensor(handle);
}

// out += a b, by the vendor's library.
inline void add_product(const Tensor& out, const Tensor& a, const Tensor& b) {
#ifdef MLORA_EMULATE
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
#else
  MLORA_CHECK(aoti_torch_cuda_addmm_out, "this torch was built without CUDA");
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
#endif
}

}  // namespace mlora::cuda
