// The adapters of one call, given as lists of tensors or as tables of addresses.
#pragma once

#include <vector>

#include "cpu/plan.h"

namespace mlora::cpu {

// A row of the tables that `mlora_ext.backends.factors` makes: in elements; offsets count from the first
// adapter's matrix and gradient.
struct TableRow {
  int64_t offset;
  int64_t rank_stride;
  int64_t col_stride;
  int64_t rank;
  int64_t grad_offset;
  int64_t grad_rank_stride;
  int64_t grad_col_stride;
  int64_t unused;
};

inline const TableRow* table_rows(const Tensor& table, const char* name, int64_t adapters) {
  MLORA_CHECK(table.is_cpu() && table.dim() == 2 && table.size(0) == adapters && table.size(1) == 8 &&
                  table.scalar_type() == ScalarType::Long && table.is_contiguous(),
              name, ": expected a contiguous CPU Long tensor of shape [", adapters, ", 8], got ",
              dtype_name(table.scalar_type()), " of shape ", shape_of(table));
  return static_cast<const TableRow*>(table.const_data_ptr());
}

// [rank, cols] of every adapter: A, B transposed, or their gradients.
class Matrices {
 public:
  Matrices() = default;
  Matrices(const std::vector<Tensor>& tensors, bool transpose) : count_(tensors.size()) {
    views_.reserve(count_);
    for (const Tensor& tensor : tensors) {
      views_.push_back(view_of(tensor, transpose));
    }
  }
  // Of a table whose first matrix, or gradient, this is.
  Matrices(const Tensor& first, const TableRow* rows, size_t count, bool gradients)
      : rows_(rows),
        data_(static_cast<char*>(first.mutable_data_ptr())),
        element_(static_cast<int64_t>(first.element_size())),
        type_(scalar_of(first.scalar_type())),
        gradients_(gradients),
        count_(count) {}

  size_t count() const { return count_; }
  MatrixView at(size_t i) const {
    if (!rows_) {
      return views_[i];
    }
    const TableRow& row = rows_[i];
    return gradients_ ? MatrixView{data_ + row.grad_offset * element_, row.grad_rank_stride,
                                   row.grad_col_stride, type_}
                      : MatrixView{data_ + row.offset * element_, row.rank_stride, row.col_stride, type_};
  }

 private:
  std::vector<MatrixView> views_;
  const TableRow* rows_ = nullptr;
  char* data_ = nullptr;
  int64_t element_ = 0;
  Scalar type_ = Scalar::kFloat;
  bool gradients_ = false;
  size_t count_ = 0;
};

struct Adapters {
  std::vector<int64_t> ranks;
  Matrices a;
  Matrices b;
};

inline Adapters adapters_of(const std::vector<Tensor>& lora_a, const std::vector<Tensor>& lora_b) {
  Adapters adapters{{}, Matrices(lora_a, false), Matrices(lora_b, true)};
  for (const Tensor& matrix : lora_a) {
    adapters.ranks.push_back(matrix.size(0));
  }
  return adapters;
}

inline Adapters adapters_of(const Tensor& a, const Tensor& a_table, const Tensor& b, const Tensor& b_table) {
  const int64_t count = a_table.size(0);
  const TableRow* a_rows = table_rows(a_table, "a_table", count);
  const TableRow* b_rows = table_rows(b_table, "b_table", count);
  for (const Tensor* first : {&a, &b}) {
    MLORA_CHECK(first->is_cpu() && first->dim() == 2 && is_scalar(first->scalar_type()),
                "a, b: expected the first adapter's CPU matrices, got ", dtype_name(first->scalar_type()),
                " of shape ", shape_of(*first));
  }
  const size_t size = static_cast<size_t>(count);
  Adapters adapters{{}, Matrices(a, a_rows, size, false), Matrices(b, b_rows, size, false)};
  adapters.ranks.reserve(size);
  for (size_t i = 0; i < size; ++i) {
    adapters.ranks.push_back(a_rows[i].rank);
  }
  return adapters;
}

inline Matrices gradients_of(const Tensor& first, const Tensor& table) {
  const int64_t count = table.size(0);
  return Matrices(first, table_rows(table, "table", count), static_cast<size_t>(count), true);
}

}  // namespace mlora::cpu
