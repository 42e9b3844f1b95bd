// One call's plan: adapters and row blocks, their operands, and the memory and threads to work with.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/kernels.h"
#include "tensors.h"

namespace mlora::cpu {

// The tensors that say which rows belong to which adapter.
struct Layout {
  const Tensor& segments;
  const Tensor& scaling;
  const Tensor* dropout_p;
  const Tensor* dropout_rng;
  const Tensor* layer;
};

// Neighbouring blocks of one adapter, whose gradients are summed by one task. Where an adapter's blocks are
// cut into groups depends on its own rows and rank, and on the layer's shape.
struct BlockGroup {
  int32_t adapter;
  int32_t first_block;
  int64_t block_count;
  int64_t index;  // among the adapter's groups
};

struct Plan {
  std::vector<AdapterView> adapters;
  std::vector<RowBlock> blocks;
  int64_t max_rank = 0;
  int64_t rows = 0;       // of x
  int64_t rank_rows = 0;  // sum of rows times rank
};

// Reads the layout; the adapters' operands are not set yet.
Plan make_plan(const Layout& layout, const std::vector<int64_t>& ranks, int64_t rows);

// `columns` of the layer: d_in + d_out.
std::vector<BlockGroup> groups_of(const Plan& plan, int64_t columns);

// Everything that the arguments must be before a kernel may trust them: the frozen part, and the adapters'.
void check_base(const Tensor& x, const Tensor& weight, const Tensor* bias);
void check_adapters(const Tensor& x, int64_t d_out, const std::vector<Tensor>& lora_a,
                    const std::vector<Tensor>& lora_b, const Layout& layout);
void check_layout(const Layout& layout, int64_t adapters);
// A matrix of as many rows as x and of its dtype that a kernel adds to; `columns` of -1 = any number.
void check_product(const Tensor& product, const char* name, const Tensor& x, int64_t columns);

// One allocation, handed out in aligned pieces: first reserve all, then allocate, then look up.
class Workspace {
 public:
  int64_t reserve(int64_t bytes) {
    const int64_t offset = size_;
    size_ += (bytes + 63) / 64 * 64;
    return offset;
  }
  void allocate() {
    memory_ = empty_cpu({size_}, {1}, ScalarType::Byte);
    data_ = static_cast<char*>(memory_.mutable_data_ptr());
  }
  char* at(int64_t offset) const { return data_ + offset; }

 private:
  int64_t size_ = 0;
  Tensor memory_;
  char* data_ = nullptr;
};

// Torch's threads for one call. Tasks are taken in order by whichever thread is free; results cannot depend
// on it.
class Team {
 public:
  // `work` in multiply-adds: little work stays on the calling thread. At most `most` threads; 0 = torch's.
  explicit Team(int64_t work, int64_t most = 0);
  int64_t threads() const { return threads_; }

  template <typename Task>
  void run(int64_t tasks, const Task& task) const {
    const int64_t threads = std::min(threads_, tasks);
    if (threads <= 1) {
      for (int64_t i = 0; i < tasks; ++i) {
        task(i, 0);
      }
      return;
    }
    std::atomic<int64_t> next = 0;
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) {
      for (int64_t i = next++; i < tasks; i = next++) {
        task(i, begin);
      }
    });
  }

 private:
  int64_t threads_;
};

}  // namespace mlora::cpu
