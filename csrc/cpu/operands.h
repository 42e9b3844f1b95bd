// Adapter matrices as the kernels read them: in place where they already fit, else packed, by the task that
// has all rows of the adapter, or once for all tasks.
#pragma once

#include <array>
#include <vector>

#include "cpu/adapters.h"

namespace mlora::cpu {

class Operands {
 public:
  // `tasks`: how many tasks share each adapter's rows.
  Operands(const Kernels& kernels, std::vector<AdapterView>& adapters, const std::vector<int32_t>& tasks,
           Workspace& workspace)
      : kernels_(kernels), adapters_(adapters), tasks_(tasks), workspace_(workspace) {}

  void add_a(const Matrices& a, int64_t cols, Along along) {
    add(a, cols, along, 0, &AdapterView::a, &AdapterView::a_stride);
  }
  void add_b(const Matrices& b, int64_t cols, Along along) {
    add(b, cols, along, 1, &AdapterView::b, &AdapterView::b_stride);
  }

  // Before the workspace is allocated, once all are added: for so many threads.
  void reserve(int64_t threads) {
    alone_bytes_ = largest_[0] + largest_[1];
    alone_ = workspace_.reserve(alone_bytes_ * threads);
  }

  // Once the workspace is allocated: fills what several tasks read and could not be read in place.
  void pack_shared(const Team& team) const;

  // By the only task of an adapter, before it runs: its matrices are in this thread's caches then.
  void pack_alone(int32_t adapter, int64_t thread) const;

 private:
  struct Entry {
    PackArgs args;
    int64_t offset;
    const void** operand;
  };

  void add(const Matrices& matrices, int64_t cols, Along along, size_t which,
           const void* AdapterView::* operand, int64_t AdapterView::* stride);

  const Kernels& kernels_;
  std::vector<AdapterView>& adapters_;
  const std::vector<int32_t>& tasks_;
  Workspace& workspace_;
  std::vector<Entry> shared_;
  std::array<std::vector<Entry>, 2> own_;  // of A and of B, by adapter, if any
  std::array<int64_t, 2> largest_{};
  int64_t alone_bytes_ = 0;
  int64_t alone_ = 0;
};

inline void Operands::add(const Matrices& matrices, int64_t cols, Along along, size_t which,
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
      continue;
    }
    const int64_t dense = adapter.rank * cols * element_size(kernels_.compute);
    const int64_t bytes = ((packed ? packed : dense) + 63) / 64 * 64;
    adapter.*stride = cols;
    Entry entry{{view, along, adapter.rank, cols, 0, cols, nullptr}, 0, &(adapter.*operand)};
    if (tasks_[i] == 1) {
      own_[which].resize(matrices.count());
      own_[which][i] = entry;
      largest_[which] = std::max(largest_[which], bytes);
    } else {
      entry.offset = workspace_.reserve(bytes);
      shared_.push_back(entry);
    }
  }
}

inline void Operands::pack_shared(const Team& team) const {
  constexpr int64_t kColumns = 512;
  std::vector<PackArgs> pieces;
  for (const Entry& entry : shared_) {
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

inline void Operands::pack_alone(int32_t adapter, int64_t thread) const {
  int64_t offset = alone_ + thread * alone_bytes_;
  for (size_t which = 0; which < own_.size(); ++which) {
    if (!own_[which].empty() && own_[which][static_cast<size_t>(adapter)].operand) {
      const Entry& entry = own_[which][static_cast<size_t>(adapter)];
      PackArgs args = entry.args;
      *entry.operand = args.target = workspace_.at(offset);
      kernels_.pack(args);
    }
    offset += largest_[which];
  }
}

}  // namespace mlora::cpu
