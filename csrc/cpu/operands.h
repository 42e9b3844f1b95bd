// Adapter matrices as the kernels read them: in place where they already fit, packed once per call where not.
#pragma once

#include <vector>

#include "cpu/adapters.h"

namespace mlora::cpu {

class Operands {
 public:
  Operands(const Kernels& kernels, std::vector<AdapterView>& adapters, Workspace& workspace)
      : kernels_(kernels), adapters_(adapters), workspace_(workspace) {}

  void add_a(const Matrices& a, int64_t cols, Along along) {
    add(a, cols, along, &AdapterView::a, &AdapterView::a_stride);
  }
  void add_b(const Matrices& b, int64_t cols, Along along) {
    add(b, cols, along, &AdapterView::b, &AdapterView::b_stride);
  }

  // Once the workspace is allocated: fills what could not be read in place.
  void pack(const Team& team) const;

 private:
  struct Entry {
    PackArgs args;
    int64_t offset;
    const void** operand;
  };

  void add(const Matrices& matrices, int64_t cols, Along along, const void* AdapterView::* operand,
           int64_t AdapterView::* stride);

  const Kernels& kernels_;
  std::vector<AdapterView>& adapters_;
  Workspace& workspace_;
  std::vector<Entry> entries_;
};

inline void Operands::add(const Matrices& matrices, int64_t cols, Along along,
                          const void* AdapterView::* operand, int64_t AdapterView::* stride) {
  for (size_t i = 0; i < matrices.count(); ++i) {
    AdapterView& adapter = adapters_[i];
    if (adapter.first_block < 0) {
      continue;
    }
    const MatrixView view = matrices.at(i);
    const int64_t packed = kernels_.packed_bytes(along, adapter.rank, cols);
    if (!packed && view.type == kernels_.compute && view.col_stride == 1) {
      adapter.*operand = view.data;
      adapter.*stride = view.row_stride;
    } else {
      const int64_t dense = adapter.rank * cols * element_size(kernels_.compute);
      adapter.*stride = cols;
      entries_.push_back({{view, along, adapter.rank, cols, 0, cols, nullptr},
                          workspace_.reserve(packed ? packed : dense),
                          &(adapter.*operand)});
    }
  }
}

inline void Operands::pack(const Team& team) const {
  constexpr int64_t kColumns = 512;
  std::vector<PackArgs> pieces;
  for (const Entry& entry : entries_) {
    *entry.operand = workspace_.at(entry.offset);
    PackArgs piece = entry.args;
    piece.target = workspace_.at(entry.offset);
    for (piece.begin = 0; piece.begin < piece.cols; piece.begin += kColumns) {
      piece.end = std::min(piece.cols, piece.begin + kColumns);
      pieces.push_back(piece);
    }
  }
  team.run(static_cast<int64_t>(pieces.size()),
           [&](int64_t task, int64_t) { kernels_.pack(pieces[static_cast<size_t>(task)]); });
}

}  // namespace mlora::cpu
