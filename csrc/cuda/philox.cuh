// Philox4x32-10 (Salmon et al., SC 2011) on the device; docs/design.md says which counter serves which
// element.
#pragma once

#include <cstdint>

#include "params.h"

namespace mlora::cuda {

// The four output words: eight 16-bit numbers, for eight neighbouring columns of one row.
__device__ inline uint4 philox(const Dropout& dropout, uint32_t row, uint32_t counter) {
  uint4 c = {counter, row, dropout.layer, dropout.step};
  uint32_t key0 = dropout.key0;
  uint32_t key1 = dropout.key1;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c.x);
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c.z);
    c = {high1 ^ c.y ^ key0, 0xCD9E8D57u * c.z, high0 ^ c.w ^ key1, 0xD2511F53u * c.x};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

__device__ inline bool keeps(uint4 words, int column, uint32_t threshold) {
  const uint32_t pair = column < 2 ? words.x : column < 4 ? words.y : column < 6 ? words.z : words.w;
  return (column % 2 == 0 ? pair & 0xffffu : pair >> 16) >= threshold;
}

}  // namespace mlora::cuda
