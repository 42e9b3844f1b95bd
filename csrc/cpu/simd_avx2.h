// Eight fp32 lanes: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "cpu/philox.h"
#include "cpu/scalars.h"
#include "params.h"

namespace mlora::cpu::MLORA_ISA {

struct Simd {
  using Vec = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kTileRows = 6;
  static constexpr int kTileVecs = 2;
  static constexpr int kDotRows = 2;

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec set1(float value) { return _mm256_set1_ps(value); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
  static Vec keep(Vec a, uint64_t bits) { return _mm256_and_ps(a, mask(bits)); }

  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static Vec load(const float* p, int64_t n) { return _mm256_maskload_ps(p, first(n)); }
  static Vec load(const BF16* p) { return widen(load16(p)); }
  static Vec load(const BF16* p, int64_t n) { return widen(load16(p, n)); }
  static Vec load(const Half* p) { return _mm256_cvtph_ps(load16(p)); }
  static Vec load(const Half* p, int64_t n) { return _mm256_cvtph_ps(load16(p, n)); }

  static void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static void store(float* p, Vec v, int64_t n) { _mm256_maskstore_ps(p, first(n), v); }
  static void store(BF16* p, Vec v) { store16(p, narrow(v)); }
  static void store(BF16* p, Vec v, int64_t n) { store16(p, narrow(v), n); }
  static void store(Half* p, Vec v) { store16(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
  static void store(Half* p, Vec v, int64_t n) {
    store16(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT), n);
  }

  // Only the lanes whose bit is set.
  template <typename T>
  static void store_kept(T* p, Vec v, uint64_t bits) {
    store(p, _mm256_blendv_ps(load(p), v, mask(bits)));
  }
  template <typename T>
  static void store_kept(T* p, Vec v, uint64_t bits, int64_t n) {
    store(p, _mm256_blendv_ps(load(p, n), v, mask(bits)), n);
  }

  // Sums of the lanes of four vectors.
  static void sum4(const Vec* v, float* out) {
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
  }

 private:
  static Vec mask(uint64_t bits) {
    const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits & 0xff)), lane_bit);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane_bit));
  }
  static __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m128i load16(const void* p, int64_t n) {
    alignas(16) uint16_t lanes[8] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * 2);
    return _mm_load_si128(reinterpret_cast<const __m128i*>(lanes));
  }
  static void store16(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }
  static void store16(void* p, __m128i v, int64_t n) {
    alignas(16) uint16_t lanes[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), v);
    std::memcpy(p, lanes, static_cast<size_t>(n) * 2);
  }
  static Vec widen(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }
  static __m128i narrow(Vec v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high =
        _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), unordered), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
};

// Keep bits of one word of 64 columns: two groups of four counters that hide each other's latency.
inline uint64_t philox_word(const Dropout& dropout, uint32_t row, uint32_t counter) {
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxMultiplier0);
  const __m256i m1 = _mm256_set1_epi64x(kPhiloxMultiplier1);
  __m256i c0[2], c1[2], c2[2], c3[2];
  for (int i = 0; i < 2; ++i) {
    c0[i] = _mm256_add_epi64(_mm256_set1_epi64x(counter),
                             _mm256_setr_epi64x(4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3));
    c1[i] = _mm256_set1_epi64x(row);
    c2[i] = _mm256_set1_epi64x(dropout.layer);
    c3[i] = _mm256_set1_epi64x(dropout.step);
  }
  uint32_t k0 = dropout.key0;
  uint32_t k1 = dropout.key1;
  static_assert(kPhiloxRounds == 7);
#pragma GCC unroll 7
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m256i key0 = _mm256_set1_epi64x(k0);
    const __m256i key1 = _mm256_set1_epi64x(k1);
    for (int i = 0; i < 2; ++i) {
      const __m256i p0 = _mm256_mul_epu32(m0, c0[i]);
      const __m256i p1 = _mm256_mul_epu32(m1, c2[i]);
      c0[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1[i]), key0);
      c2[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3[i]), key1);
      c1[i] = p1;
      c3[i] = p0;
    }
    k0 += kPhiloxBump0;
    k1 += kPhiloxBump1;
  }
  const __m256i threshold = _mm256_set1_epi16(static_cast<int16_t>(dropout.threshold));
  uint64_t both = 0;
  for (int i = 0; i < 2; ++i) {
    const __m256i w01 = _mm256_blend_epi32(c0[i], _mm256_slli_epi64(c1[i], 32), 0xAA);
    const __m256i w23 = _mm256_blend_epi32(c2[i], _mm256_slli_epi64(c3[i], 32), 0xAA);
    // lanes of even[k], odd[k] hold numbers 0..7 of counters (0, 2) and (1, 3)
    const __m256i even = _mm256_unpacklo_epi64(w01, w23);
    const __m256i odd = _mm256_unpackhi_epi64(w01, w23);
    const __m256i keep_even = _mm256_cmpeq_epi16(_mm256_max_epu16(even, threshold), even);
    const __m256i keep_odd = _mm256_cmpeq_epi16(_mm256_max_epu16(odd, threshold), odd);
    const uint32_t word =
        static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_packs_epi16(keep_even, keep_odd)));
    both |= static_cast<uint64_t>(word) << (32 * i);
  }
  return both;
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
