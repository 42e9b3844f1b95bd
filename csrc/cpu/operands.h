// Adapter matrices as the kernels read them: in place where they already fit, converted once per call where
// not.
#pragma once

#include <vector>

#include "cpu/plan.h"

namespace mlora::cpu {

class Operands {
 public:
  Operands(const Kernels& kernels, std::vector<AdapterView>& adapters, Workspace& workspace)
      : kernels_(kernels), adapters_(adapters), workspace_(workspace) {}

  void add_a(const std::vector<Tensor>& lora_a) {
    add(lora_a, false, &AdapterView::a, &AdapterView::a_stride);
  }
  void add_b(const std::vector<Tensor>& lora_b) {
    add(lora_b, true, &AdapterView::b, &AdapterView::b_stride);
  }

  // Once the workspace is allocated: fills what could not be read in place.
  void convert(const Team& team) const;

 private:
  struct Entry {
    MatrixView source;
    int64_t rank;
    int64_t width;
    int64_t offset;
    const void** operand;
  };

  void add(const std::vector<Tensor>& matrices, bool transpose, const void* AdapterView::* operand,
           int64_t AdapterView::* stride);

  const Kernels& kernels_;
  std::vector<AdapterView>& adapters_;
  Workspace& workspace_;
  std::vector<Entry> entries_;
};

inline void Operands::add(const std::vector<Tensor>& matrices, bool transpose,
                          const void* AdapterView::* operand, int64_t AdapterView::* stride) {
  for (size_t i = 0; i < matrices.size(); ++i) {
    AdapterView& adapter = adapters_[i];
    if (adapter.first_block < 0) {
      continue;
    }
    const MatrixView view = view_of(matrices[i], transpose);
    if (view.type == kernels_.compute && view.col_stride == 1) {
      adapter.*operand = view.data;
      adapter.*stride = view.row_stride;
    } else {
      const int64_t width = matrices[i].size(transpose ? 0 : 1);
      const int64_t offset = workspace_.reserve(adapter.rank * width * element_size(kernels_.compute));
      adapter.*stride = width;
      entries_.push_back({view, adapter.rank, width, offset, &(adapter.*operand)});
    }
  }
}

inline void Operands::convert(const Team& team) const {
  constexpr int64_t kColumns = 2048;
  struct Piece {
    const Entry* entry;
    int64_t begin;
  };
  std::vector<Piece> pieces;
  for (const Entry& entry : entries_) {
    *entry.operand = workspace_.at(entry.offset);
    for (int64_t begin = 0; begin < entry.width; begin += kColumns) {
      pieces.push_back({&entry, begin});
    }
  }
  team.run(static_cast<int64_t>(pieces.size()), [&](int64_t task, int64_t) {
    const auto& [entry, begin] = pieces[static_cast<size_t>(task)];
    kernels_.convert_rows({entry->source, entry->rank, begin, std::min(entry->width, begin + kColumns),
                           workspace_.at(entry->offset), entry->width});
  });
}

}  // namespace mlora::cpu
