// Four fp32 lanes with the compiler's vector type: any processor.
#pragma once

#include <cmath>

#include "cpu/philox.h"
#include "cpu/scalars.h"
#include "params.h"

namespace mlora::cpu::MLORA_ISA {

struct Simd {
  typedef float Vec __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kTileRows = 4;
  static constexpr int kTileVecs = 2;
  static constexpr int kDotRows = 2;

  static Vec zero() { return Vec{0.0f, 0.0f, 0.0f, 0.0f}; }
  static Vec set1(float value) { return Vec{value, value, value, value}; }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  static Vec div(Vec a, Vec b) { return a / b; }
  static Vec sqrt(Vec a) {
    for (int lane = 0; lane < kLanes; ++lane) {
      a[lane] = std::sqrt(a[lane]);
    }
    return a;
  }
  static Vec keep(Vec a, uint64_t bits) {
    for (int lane = 0; lane < kLanes; ++lane) {
      a[lane] = (bits >> lane) & 1 ? a[lane] : 0.0f;
    }
    return a;
  }

  template <typename T>
  static Vec load(const T* p, int64_t n = kLanes) {
    Vec v = zero();
    for (int64_t lane = 0; lane < n; ++lane) {
      v[lane] = to_float(p[lane]);
    }
    return v;
  }
  template <typename T>
  static void store(T* p, Vec v, int64_t n = kLanes) {
    for (int64_t lane = 0; lane < n; ++lane) {
      from_float(v[lane], p + lane);
    }
  }

  // Only the lanes whose bit is set.
  template <typename T>
  static void store_kept(T* p, Vec v, uint64_t bits, int64_t n = kLanes) {
    for (int64_t lane = 0; lane < n; ++lane) {
      if ((bits >> lane) & 1) {
        from_float(v[lane], p + lane);
      }
    }
  }

  // Sums of the lanes of four vectors.
  static void sum4(const Vec* v, float* out) {
    for (int i = 0; i < 4; ++i) {
      out[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
    }
  }
};

inline uint64_t philox_word(const Dropout& dropout, uint32_t row, uint32_t counter) {
  uint64_t bits = 0;
  for (uint32_t i = 0; i < 8; ++i) {
    bits |= philox_byte(dropout, row, counter + i) << (8 * i);
  }
  return bits;
}

inline void keep_bits_block(const Dropout& dropout, uint32_t row, int64_t rows, int64_t word_begin,
                            int64_t words, uint64_t* bits, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t w = 0; w < words; ++w) {
      bits[i * stride + w] =
          philox_word(dropout, row + static_cast<uint32_t>(i), static_cast<uint32_t>((word_begin + w) * 8));
    }
  }
}

}  // namespace mlora::cpu::MLORA_ISA
