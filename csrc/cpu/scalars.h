// Storage types of 16-bit numbers and their conversions, one element at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace mlora::cpu::MLORA_ISA {

struct BF16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(BF16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }

inline float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  if (magnitude >= 0x7c00) {
    return from_bits(sign | 0x7f800000 | ((magnitude & 0x3ff) << 13));
  }
  // 2^112 moves the exponent bias from 15 to 127; subnormals come out normalised
  return from_bits(sign | to_bits(from_bits(magnitude << 13) * 0x1p112f));
}

inline void from_float(float value, float* out) { *out = value; }

inline void from_float(float value, BF16* out) {
  const uint32_t bits = to_bits(value);
  out->bits = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void from_float(float value, Half* out) {
  const uint32_t bits = to_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    out->bits = sign | 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // rounds to 65520 or more: infinity
    out->bits = sign | 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 rounds to the subnormal grid
    out->bits = sign | static_cast<uint16_t>(to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000);
  } else {
    out->bits =
        sign | static_cast<uint16_t>((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
  }
}

}  // namespace mlora::cpu::MLORA_ISA
