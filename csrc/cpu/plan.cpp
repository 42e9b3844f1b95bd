#include "cpu/plan.h"

#include <algorithm>
#include <cmath>

namespace mlora::cpu {
namespace {

// Below this many multiply-adds, waking the other threads costs more than it saves.
constexpr int64_t kParallelWork = int64_t{1} << 19;
// Blocks of a group at least, groups of an adapter at most, and bytes of their sums at most.
constexpr int64_t kGroupBlocks = 4;
constexpr int64_t kMostGroups = 16;
constexpr int64_t kMostSums = int64_t{8} << 20;

void check_vector(const Tensor& tensor, const char* name, int64_t size, ScalarType type) {
  MLORA_CHECK(tensor.is_cpu() && tensor.dim() == 1 && tensor.size(0) == size &&
                  tensor.scalar_type() == type && tensor.is_contiguous(),
              name, ": expected a contiguous CPU ", dtype_name(type), " tensor of shape [", size, "], got ",
              dtype_name(tensor.scalar_type()), " of shape ", shape_of(tensor));
}

void check_adapter(const Tensor& matrix, const char* name, size_t index, int64_t dimension, int64_t size,
                   ScalarType x_type) {
  MLORA_CHECK(matrix.is_cpu() && matrix.dim() == 2 && matrix.size(dimension) == size &&
                  matrix.size(1 - dimension) >= 1,
              name, "[", index, "]: expected a CPU matrix with ", size, dimension == 0 ? " rows" : " columns",
              " and a rank of at least 1, got shape ", shape_of(matrix));
  MLORA_CHECK(matrix.scalar_type() == x_type || matrix.scalar_type() == ScalarType::Float, name, "[", index,
              "]: expected dtype ", dtype_name(x_type), " (that of x) or Float, got ",
              dtype_name(matrix.scalar_type()));
}

void check_dropout(const Layout& layout, int64_t adapters) {
  const bool all = layout.dropout_p && layout.dropout_rng && layout.layer;
  MLORA_CHECK(all, "dropout_p, dropout_rng and layer: give all three or none");
  check_vector(*layout.dropout_p, "dropout_p", adapters, ScalarType::Float);
  const Tensor& rng = *layout.dropout_rng;
  MLORA_CHECK(rng.is_cpu() && rng.dim() == 2 && rng.size(0) == adapters && rng.size(1) == 2 &&
                  rng.scalar_type() == ScalarType::Long && rng.is_contiguous(),
              "dropout_rng: expected a contiguous CPU Long tensor of shape [", adapters, ", 2], got ",
              dtype_name(rng.scalar_type()), " of shape ", shape_of(rng));
  const Tensor& layer = *layout.layer;
  MLORA_CHECK(layer.is_cpu() && layer.numel() == 1 && layer.scalar_type() == ScalarType::Long,
              "layer: expected one CPU Long number, got ", dtype_name(layer.scalar_type()), " of shape ",
              shape_of(layer));
}

// The dropout of every adapter in one layer.
class Dropouts {
 public:
  explicit Dropouts(const Layout& layout) {
    if (layout.dropout_p) {
      p_ = static_cast<const float*>(layout.dropout_p->const_data_ptr());
      rng_ = static_cast<const int64_t*>(layout.dropout_rng->const_data_ptr());
      layer_ = static_cast<uint32_t>(*static_cast<const int64_t*>(layout.layer->const_data_ptr()));
    }
  }

  Dropout of(size_t adapter) const {
    Dropout dropout;
    if (!p_) {
      return dropout;
    }
    const double p = p_[adapter];
    const double threshold = std::nearbyint(p * 65536.0);
    MLORA_CHECK(threshold >= 0.0 && threshold < 65536.0, "dropout_p[", adapter,
                "]: expected 0 <= p < 1, got ", p);
    const int64_t* rng = rng_ + 2 * adapter;
    dropout.threshold = static_cast<uint32_t>(threshold);
    dropout.keep_scale = static_cast<float>(1.0 / (1.0 - threshold / 65536.0));
    dropout.key0 = static_cast<uint32_t>(rng[0]);
    dropout.key1 = static_cast<uint32_t>(static_cast<uint64_t>(rng[0]) >> 32);
    dropout.step = static_cast<uint32_t>(rng[1]);
    dropout.layer = layer_;
    return dropout;
  }

 private:
  const float* p_ = nullptr;
  const int64_t* rng_ = nullptr;
  uint32_t layer_ = 0;
};

void check_rows(const Tensor& x) {
  MLORA_CHECK(x.is_cpu() && x.dim() == 2, "x: expected a CPU matrix [rows, d_in], got shape ", shape_of(x));
  MLORA_CHECK(is_scalar(x.scalar_type()), "x: expected dtype Float, BFloat16 or Half, got ",
              dtype_name(x.scalar_type()));
}

struct Segment {
  int64_t begin;
  int64_t end;
  int64_t adapter;
  int64_t row0;
};

void check_segment(const Segment& segment, int64_t index, int64_t cursor, int64_t rows, int64_t adapters) {
  MLORA_CHECK(segment.begin >= cursor && segment.end <= rows, "segments[", index, "]: expected rows within [",
              cursor, ", ", rows, ") after those of the segments before, got [", segment.begin, ", ",
              segment.end, ")");
  MLORA_CHECK(segment.adapter >= -1 && segment.adapter < adapters, "segments[", index,
              "]: expected an adapter in [-1, ", adapters, "), got ", segment.adapter);
}

void add_blocks(const Segment& segment, const Dropouts& dropouts, Plan& plan, std::vector<int32_t>& last) {
  AdapterView& adapter = plan.adapters[static_cast<size_t>(segment.adapter)];
  if (adapter.first_block < 0) {
    adapter.dropout = dropouts.of(static_cast<size_t>(segment.adapter));
  }
  int32_t& tail = last[static_cast<size_t>(segment.adapter)];
  for (int64_t begin = segment.begin; begin < segment.end; begin += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, segment.end - begin);
    const int32_t index = static_cast<int32_t>(plan.blocks.size());
    const uint32_t philox_row = static_cast<uint32_t>(segment.row0 + begin - segment.begin);
    plan.blocks.push_back({begin, rows, philox_row, static_cast<int32_t>(segment.adapter), -1});
    (tail < 0 ? adapter.first_block : plan.blocks[static_cast<size_t>(tail)].next) = index;
    tail = index;
  }
  plan.rank_rows += (segment.end - segment.begin) * adapter.rank;
}

}  // namespace

Team::Team(int64_t work, int64_t most) : threads_(1) {
  if (work >= kParallelWork) {
    const int64_t all = static_cast<int64_t>(torch::stable::get_num_threads());
    threads_ = most > 0 ? std::min(most, all) : all;
  }
}

Plan make_plan(const Layout& layout, const std::vector<int64_t>& ranks, int64_t rows) {
  Plan plan;
  plan.rows = rows;
  plan.adapters.resize(ranks.size());
  std::vector<int32_t> last(ranks.size(), -1);
  const Dropouts dropouts(layout);
  const float* scaling = static_cast<const float*>(layout.scaling.const_data_ptr());
  for (size_t i = 0; i < ranks.size(); ++i) {
    AdapterView& adapter = plan.adapters[i];
    adapter.rank = ranks[i];
    adapter.scaling = scaling[i];
    plan.max_rank = std::max(plan.max_rank, adapter.rank);
  }
  const auto* table = static_cast<const Segment*>(layout.segments.const_data_ptr());
  const int64_t segments = layout.segments.size(0);
  plan.blocks.reserve(static_cast<size_t>(segments + rows / kBlockRows));
  int64_t cursor = 0;
  for (int64_t i = 0; i < segments; ++i) {
    if (table[i].begin >= table[i].end) {
      continue;
    }
    check_segment(table[i], i, cursor, rows, static_cast<int64_t>(ranks.size()));
    cursor = table[i].end;
    if (table[i].adapter >= 0) {
      add_blocks(table[i], dropouts, plan, last);
    }
  }
  return plan;
}

std::vector<BlockGroup> groups_of(const Plan& plan, int64_t columns) {
  std::vector<BlockGroup> groups;
  for (size_t i = 0; i < plan.adapters.size(); ++i) {
    int64_t blocks = 0;
    for (int32_t block = plan.adapters[i].first_block; block >= 0;
         block = plan.blocks[static_cast<size_t>(block)].next) {
      ++blocks;
    }
    // several groups for several threads, but sums of at most an eighth of the rows' bytes in 16 bits
    const int64_t rank = std::max<int64_t>(plan.adapters[i].rank, 1);
    const int64_t groups_at_most = std::clamp<int64_t>(kMostSums / (rank * columns * 4), 1, kMostGroups);
    const int64_t most = std::max({kGroupBlocks, rank / 4, (blocks + groups_at_most - 1) / groups_at_most});
    int64_t done = 0;
    for (int32_t block = plan.adapters[i].first_block; block >= 0;
         block = plan.blocks[static_cast<size_t>(block)].next, ++done) {
      if (done % most == 0) {
        groups.push_back({static_cast<int32_t>(i), block, 0, done / most});
      }
      ++groups.back().block_count;
    }
  }
  return groups;
}

void check_base(const Tensor& x, const Tensor& weight, const Tensor* bias) {
  check_rows(x);
  const ScalarType type = x.scalar_type();
  MLORA_CHECK(weight.is_cpu() && weight.dim() == 2 && weight.size(1) == x.size(1),
              "weight: expected a CPU matrix [d_out, ", x.size(1), "], got shape ", shape_of(weight));
  MLORA_CHECK(weight.scalar_type() == type, "weight: expected dtype ", dtype_name(type), " (that of x), got ",
              dtype_name(weight.scalar_type()));
  MLORA_CHECK(x.size(1) >= 1 && weight.size(0) >= 1,
              "weight: expected d_in and d_out of at least 1, got shape ", shape_of(weight));
  MLORA_CHECK(!bias || (bias->is_cpu() && bias->dim() == 1 && bias->size(0) == weight.size(0) &&
                        bias->scalar_type() == type),
              "bias: expected a CPU ", dtype_name(type), " vector of ", weight.size(0), " numbers, got ",
              dtype_name(bias->scalar_type()), " of shape ", shape_of(*bias));
}

void check_adapters(const Tensor& x, int64_t d_out, const std::vector<Tensor>& lora_a,
                    const std::vector<Tensor>& lora_b, const Layout& layout) {
  check_rows(x);
  const ScalarType type = x.scalar_type();
  MLORA_CHECK(lora_a.size() == lora_b.size(), "lora_b: expected as many matrices as lora_a (", lora_a.size(),
              "), got ", lora_b.size());
  for (size_t i = 0; i < lora_a.size(); ++i) {
    check_adapter(lora_a[i], "lora_a", i, 1, x.size(1), type);
    check_adapter(lora_b[i], "lora_b", i, 0, d_out, type);
    MLORA_CHECK(lora_b[i].size(1) == lora_a[i].size(0), "lora_b[", i, "]: expected rank ", lora_a[i].size(0),
                " (that of lora_a[", i, "]), got ", lora_b[i].size(1));
  }
  check_layout(layout, static_cast<int64_t>(lora_a.size()));
}

void check_product(const Tensor& product, const char* name, const Tensor& x, int64_t columns) {
  check_rows(x);
  const bool rows = product.is_cpu() && product.dim() == 2 && product.size(0) == x.size(0) &&
                    product.scalar_type() == x.scalar_type();
  MLORA_CHECK(
      rows && (columns < 0 || product.size(1) == columns) && (product.size(1) == 1 || product.stride(1) == 1),
      name, ": expected a CPU ", dtype_name(x.scalar_type()), " matrix of ", x.size(0), " dense rows, got ",
      dtype_name(product.scalar_type()), " of shape ", shape_of(product));
}

void check_layout(const Layout& layout, int64_t adapters) {
  const Tensor& segments = layout.segments;
  MLORA_CHECK(segments.is_cpu() && segments.dim() == 2 && segments.size(1) == 4 &&
                  segments.scalar_type() == ScalarType::Long && segments.is_contiguous(),
              "segments: expected a contiguous CPU Long tensor of shape [segments, 4], got ",
              dtype_name(segments.scalar_type()), " of shape ", shape_of(segments));
  check_vector(layout.scaling, "scaling", adapters, ScalarType::Float);
  if (layout.dropout_p || layout.dropout_rng || layout.layer) {
    check_dropout(layout, adapters);
  }
}

}  // namespace mlora::cpu
