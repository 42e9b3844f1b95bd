#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/lora_linear.h"
#include "cpu/plan.h"

namespace mlora::cpu {

Tensor dropout_mask(const Tensor& segments, const Tensor& dropout_p, const Tensor& dropout_rng,
                    const Tensor& layer, int64_t rows, int64_t columns) {
  MLORA_CHECK(rows >= 0 && columns >= 1, "rows, columns: expected at least 0 and 1, got ", rows, " and ",
              columns);
  const Kernels& table = kernels(Scalar::kFloat);
  const Layout layout{segments, dropout_p, &dropout_p, &dropout_rng, &layer};
  check_layout(layout, dropout_p.numel());
  const Plan plan = make_plan(layout, std::vector<int64_t>(static_cast<size_t>(dropout_p.numel()), 1), rows);
  Tensor mask = empty_cpu(rows, columns, ScalarType::Bool);
  bool* data = static_cast<bool*>(mask.mutable_data_ptr());
  std::memset(data, 1, static_cast<size_t>(rows * columns));
  std::vector<uint64_t> bits(static_cast<size_t>((columns + 63) / 64));
  for (const RowBlock& block : plan.blocks) {
    const Dropout& dropout = plan.adapters[static_cast<size_t>(block.adapter)].dropout;
    for (int64_t i = 0; i < block.rows; ++i) {
      table.keep_bits(dropout, block.philox_row + static_cast<uint32_t>(i), static_cast<int64_t>(bits.size()),
                      bits.data());
      for (int64_t c = 0; c < columns; ++c) {
        data[(block.begin + i) * columns + c] = (bits[static_cast<size_t>(c / 64)] >> (c % 64)) & 1;
      }
    }
  }
  return mask;
}

}  // namespace mlora::cpu
