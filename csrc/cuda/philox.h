// Philox4x32-10 (Salmon et al., SC 2011); docs/design.md says which counter serves which element.
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

MLORA_HD Dropout dropout_of(const DropoutTables& tables, int layer, int adapter) {
  Dropout dropout;
  if (tables.p != nullptr) {
    const uint64_t seed = static_cast<uint64_t>(tables.rng[2 * adapter]);
    dropout.key0 = static_cast<uint32_t>(seed);
    dropout.key1 = static_cast<uint32_t>(seed >> 32);
    dropout.layer = static_cast<uint32_t>(tables.layers[layer]);
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
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * c.word[0];
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * c.word[2];
    c = {{static_cast<uint32_t>(product1 >> 32) ^ c.word[1] ^ key0, static_cast<uint32_t>(product1),
          static_cast<uint32_t>(product0 >> 32) ^ c.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// Bit i is set where column i of the counter is kept.
MLORA_HD uint32_t keep_byte(const PhiloxWords& words, uint32_t threshold) {
  uint32_t byte = 0;
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    byte |= ((words.word[i] & 0xffffu) >= threshold ? 1u : 0u) << (2 * i);
    byte |= ((words.word[i] >> 16) >= threshold ? 2u : 0u) << (2 * i);
  }
  return byte;
}

}  // namespace mlora::cuda
