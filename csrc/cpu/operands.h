// Adapter matrices as the kernels read them: in place where they already fit, packed once per call where not.
#pragma once

#include <vector>

#include "cpu/plan.h"

namespace mlora::cpu {

class Operands {
 public:
  Operands(const Kernels& kernels, const std::vector<Tensor>& matrices, bool transpose, const Plan& plan)
      : kernels_(kernels), matrices_(matrices), transpose_(transpose), plan_(plan) {}

  // Reserve room for the matrices that cannot be read in place. `set` receives each operand and its stride.
  void reserve(bool cols, Workspace& workspace);
  template <typename Set>
  void resolve(const Workspace& workspace, const Set& set);
  void pack(const Team& team) const;

 private:
  struct Entry {
    MatrixView view;
    int64_t rank;
    int64_t cols;
    int64_t offset;  // -1: read in place
    void* target;
    int64_t stride;
  };

  const Kernels& kernels_;
  const std::vector<Tensor>& matrices_;
  bool transpose_;
  const Plan& plan_;
  bool cols_ = false;
  std::vector<Entry> entries_;
};

inline void Operands::reserve(bool cols, Workspace& workspace) {
  cols_ = cols;
  entries_.resize(matrices_.size());
  const bool units = cols && kernels_.units > 1;
  for (size_t i = 0; i < matrices_.size(); ++i) {
    Entry& entry = entries_[i];
    entry.view = view_of(matrices_[i], transpose_);
    entry.rank = plan_.adapters[i].rank;
    entry.cols = matrices_[i].size(transpose_ ? 0 : 1);
    entry.offset = -1;
    entry.target = entry.view.data;
    entry.stride = entry.view.row_stride;
    const bool in_place = !units && entry.view.type == kernels_.compute && entry.view.col_stride == 1;
    if (!in_place && plan_.adapters[i].first_block >= 0) {
      const int64_t rows = units ? (entry.rank + kernels_.units - 1) / kernels_.units : entry.rank;
      entry.stride = entry.cols;
      entry.offset = workspace.reserve(rows * entry.cols * (units ? 4 : element_size(kernels_.compute)));
    }
  }
}

template <typename Set>
void Operands::resolve(const Workspace& workspace, const Set& set) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    entry.target = entry.offset < 0 ? entry.target : workspace.at(entry.offset);
    set(i, entry.target, entry.stride);
  }
}

inline void Operands::pack(const Team& team) const {
  constexpr int64_t kColumns = 2048;
  struct Piece {
    const Entry* entry;
    int64_t begin;
  };
  std::vector<Piece> pieces;
  for (const Entry& entry : entries_) {
    for (int64_t begin = 0; entry.offset >= 0 && begin < entry.cols; begin += kColumns) {
      pieces.push_back({&entry, begin});
    }
  }
  team.run(static_cast<int64_t>(pieces.size()), [&](int64_t task, int64_t) {
    const Entry& entry = *pieces[static_cast<size_t>(task)].entry;
    const int64_t begin = pieces[static_cast<size_t>(task)].begin;
    const int64_t end = begin + kColumns < entry.cols ? begin + kColumns : entry.cols;
    const PackArgs args{entry.view, entry.rank, entry.cols, begin, end, entry.target, entry.stride};
    (cols_ ? kernels_.pack_cols : kernels_.pack_rows)(args);
  });
}

}  // namespace mlora::cpu
