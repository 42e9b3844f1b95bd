// Philox4x32-7 (Salmon et al., SC 2011); docs/design.md says which counter serves which element.
#pragma once

#include <cmath>

#include "cuda/host_device.h"
#include "params.h"

namespace mlora::cuda {

constexpr int kCounterColumns = 8;

// Dropout of all adapters, in the device's memory; `p` is null where nothing is dropped.
struct DropoutTables {
  const float* p = nullptr;
  const int64_t* rng = nullptr;     // [N, 2]: seed, step
  const int64_t* layers = nullptr;  // [L]
};

// round-half-even(p * 65536); the product is exact
MLORA_HD uint32_t dropout_threshold(float p) { return static_cast<uint32_t>(rintf(p * 65536.0f)); }

MLORA_HD float keep_scale(uint32_t threshold) { return 65536.0f / static_cast<float>(65536 - threshold); }

// Index of a layer of this launch in the whole model.
MLORA_HD uint32_t layer_index(const DropoutTables& tables, int layer) {
  return tables.layers == nullptr ? 0 : static_cast<uint32_t>(tables.layers[layer]);
}

MLORA_HD Dropout dropout_of(const DropoutTables& tables, int layer, int adapter) {
  Dropout dropout;
  if (tables.p != nullptr) {
    const uint64_t seed = static_cast<uint64_t>(tables.rng[2 * adapter]);
    dropout.key0 = static_cast<uint32_t>(seed);
    dropout.key1 = static_cast<uint32_t>(seed >> 32);
    dropout.layer = layer_index(tables, layer);
    dropout.step = static_cast<uint32_t>(tables.rng[2 * adapter + 1]);
    dropout.threshold = dropout_threshold(tables.p[adapter]);
    dropout.keep_scale = keep_scale(dropout.threshold);
  }
  return dropout;
}

struct PhiloxWords {
  uint32_t word[4];
};

MLORA_HD PhiloxWords philox(const Dropout& dropout, uint32_t row, uint32_t counter) {
  PhiloxWords c = {{counter, row, dropout.layer, dropout.step}};
  uint32_t key0 = dropout.key0;
  uint32_t key1 = dropout.key1;
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * c.word[0];
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * c.word[2];
    c = {{static_cast<uint32_t>(product1 >> 32) ^ c.word[1] ^ key0, static_cast<uint32_t>(product1),
          static_cast<uint32_t>(product0 >> 32) ^ c.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// Which of a counter's eight columns are kept: bit i for column 2 i, bit 16 + i for column 2 i + 1.
MLORA_HD uint32_t keep_bits(const PhiloxWords& words, uint32_t threshold) {
  uint32_t bits = 0;
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    // of the low half only the low half of the threshold is compared, of the whole word the high half
    bits |= words.word[i] << 16 >= threshold << 16 ? 1u << i : 0u;
    bits |= words.word[i] >= threshold << 16 ? 0x10000u << i : 0u;
  }
  return threshold > 0xffffu ? 0u : bits;
}

}  // namespace mlora::cuda
