// What the launchers need of torch's tensors on a device: checks, the queue, views for the kernels.
#pragma once

#include <optional>

#include "cuda/kernels.h"
#include "tensors.h"

// Weak: a CPU-only torch does not have it, and this library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);

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

inline void check_launch(int error, const char* kernel) {
  MLORA_CHECK(error == 0, kernel, ": CUDA error ", error);
}

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

inline Rows dense_rows(void* data, int64_t stride, size_t number_size) {
  const int64_t row_bytes = stride * static_cast<int64_t>(number_size);
  return {data, stride, reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_bytes % 16 == 0};
}

// A matrix of rows at any distance, whose numbers are dense within a row.
inline Rows rows_of(const Tensor& matrix, const char* name) {
  MLORA_CHECK(on_device(matrix) && matrix.dim() == 2 && is_scalar(matrix.scalar_type()) &&
                  (matrix.size(1) == 1 || matrix.stride(1) == 1),
              name, ": expected a matrix of dense rows on the device, got ", dtype_name(matrix.scalar_type()),
              " of shape ", shape_of(matrix));
  MLORA_CHECK(matrix.size(0) <= INT32_MAX && matrix.size(1) <= INT32_MAX, name, ": too large, ",
              shape_of(matrix));
  return dense_rows(matrix.mutable_data_ptr(), matrix.stride(0), matrix.element_size());
}

// `table` has the rows of `layers` layers, one after the other.
inline FactorTable factor_of(const Tensor& factor, const Tensor& table, int64_t layers,
                             ScalarType rows_type) {
  check_table(table, "table", 8, ScalarType::Long);
  MLORA_CHECK(layers > 0 && table.size(0) % layers == 0, "table: expected rows of ", layers,
              " layers, got shape ", shape_of(table));
  MLORA_CHECK(
      on_device(factor) && (factor.scalar_type() == rows_type || factor.scalar_type() == ScalarType::Float),
      "factor: expected dtype ", dtype_name(rows_type), " (that of the rows) or Float, got ",
      dtype_name(factor.scalar_type()));
  return {factor.const_data_ptr(), static_cast<const FactorRow*>(table.const_data_ptr()),
          static_cast<int>(table.size(0) / layers), scalar_of(factor.scalar_type())};
}

inline const Tile* tiles_of(const Tensor& tiles) {
  check_table(tiles, "tiles", 4, ScalarType::Int);
  return static_cast<const Tile*>(tiles.const_data_ptr());
}

inline const Split* splits_of(const Tensor& splits) {
  check_table(splits, "splits", 4, ScalarType::Int);
  return static_cast<const Split*>(splits.const_data_ptr());
}

struct DropoutInputs {
  std::optional<Tensor> p, rng, layers;
};

inline DropoutTables dropout_of(const DropoutInputs& inputs, int64_t adapters, int64_t layers) {
  const auto& [p, rng, indices] = inputs;
  MLORA_CHECK(p.has_value() == rng.has_value() && p.has_value() == indices.has_value(),
              "dropout_p, dropout_rng and layers: give all three or none");
  if (!p) {
    return {};
  }
  check_dense(*p, "dropout_p", 1, ScalarType::Float);
  check_table(*rng, "dropout_rng", 2, ScalarType::Long);
  check_dense(*indices, "layers", indices->dim(), ScalarType::Long);
  MLORA_CHECK(p->size(0) == adapters && rng->size(0) == adapters && indices->numel() == layers,
              "dropout_p, dropout_rng, layers: expected ", adapters, " adapters and ", layers,
              " layers, got shapes ", shape_of(*p), ", ", shape_of(*rng), ", ", shape_of(*indices));
  return {static_cast<const float*>(p->const_data_ptr()), static_cast<const int64_t*>(rng->const_data_ptr()),
          static_cast<const int64_t*>(indices->const_data_ptr())};
}

}  // namespace mlora::cuda
