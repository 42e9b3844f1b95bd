// Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), one counter at a
// time.
#pragma once

#include <cstdint>

#include "params.h"

namespace mlora::cpu::MLORA_ISA {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxBump0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxBump1 = 0xBB67AE85u;

// Keep bits of the eight columns of one counter.
inline uint64_t philox_byte(const Dropout& dropout, uint32_t row, uint32_t counter) {
  uint32_t c[4] = {counter, row, dropout.layer, dropout.step};
  uint32_t k0 = dropout.key0;
  uint32_t k1 = dropout.key1;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxMultiplier0) * c[0];
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxMultiplier1) * c[2];
    const uint32_t next0 = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0;
    const uint32_t next2 = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1;
    c[1] = static_cast<uint32_t>(p1);
    c[3] = static_cast<uint32_t>(p0);
    c[0] = next0;
    c[2] = next2;
    k0 += kPhiloxBump0;
    k1 += kPhiloxBump1;
  }
  uint64_t bits = 0;
  for (int word = 0; word < 4; ++word) {
    bits |= static_cast<uint64_t>((c[word] & 0xffff) >= dropout.threshold) << (2 * word);
    bits |= static_cast<uint64_t>((c[word] >> 16) >= dropout.threshold) << (2 * word + 1);
  }
  return bits;
}

}  // namespace mlora::cpu::MLORA_ISA
