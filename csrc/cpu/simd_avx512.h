// Sixteen fp32 lanes: AVX-512 F, BW, VL and DQ.
#pragma once

#include <immintrin.h>

#include "cpu/philox.h"
#include "cpu/scalars.h"
#include "params.h"

namespace mlora::cpu::MLORA_ISA {

struct Simd {
  using Vec = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kTileRows = 6;
  static constexpr int kTileVecs = 4;
  static constexpr int kDotRows = 6;

  static __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
  static __mmask32 first32(int64_t n) { return static_cast<__mmask32>((uint64_t{1} << n) - 1u); }

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec set1(float value) { return _mm512_set1_ps(value); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
  static Vec keep(Vec a, uint64_t bits) { return _mm512_maskz_mov_ps(static_cast<__mmask16>(bits), a); }

  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static Vec load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static Vec load(const BF16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load(const BF16* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
  static Vec load(const Half* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Vec load(const Half* p, int64_t n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }

  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static void store(float* p, Vec v, int64_t n) { _mm512_mask_storeu_ps(p, first(n), v); }
  static void store(BF16* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
  static void store(BF16* p, Vec v, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), narrow(v)); }
  static void store(Half* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store(Half* p, Vec v, int64_t n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  // Only the lanes whose bit is set; blends, since masked stores of 16-bit lanes are slow on some processors.
  static void store_kept(float* p, Vec v, uint64_t bits) {
    store(p, _mm512_mask_mov_ps(_mm512_loadu_ps(p), static_cast<__mmask16>(bits), v));
  }
  static void store_kept(BF16* p, Vec v, uint64_t bits) { blend16(p, narrow(v), bits); }
  static void store_kept(Half* p, Vec v, uint64_t bits) {
    blend16(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT), bits);
  }
  template <typename T>
  static void store_kept(T* p, Vec v, uint64_t bits, int64_t n) {
    store(p, _mm512_mask_mov_ps(load(p, n), static_cast<__mmask16>(bits), v), n);
  }

  // Sums of the lanes of four vectors.
  static void sum4(const Vec* v, float* out) {
    const __m256 s01 = _mm256_hadd_ps(fold(v[0]), fold(v[1]));
    const __m256 s23 = _mm256_hadd_ps(fold(v[2]), fold(v[3]));
    const __m256 s = _mm256_hadd_ps(s01, s23);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
  }

 private:
  static void blend16(void* p, __m256i v, uint64_t bits) {
    __m256i* target = static_cast<__m256i*>(p);
    _mm256_storeu_si256(target,
                        _mm256_mask_mov_epi16(_mm256_loadu_si256(target), static_cast<__mmask16>(bits), v));
  }
  static __m256 fold(Vec v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
  static Vec widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
  static __m256i narrow(Vec v) {
#ifdef __AVX512BF16__
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    rounded =
        _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
  }
};

// Round keys, and the part of the first rounds that depends on the row alone.
struct PhiloxRows {
  uint64_t key0[kPhiloxRounds];
  uint64_t key1[kPhiloxRounds];
  uint32_t layer_low;
  uint64_t high[kBlockRows];
  uint64_t low[kBlockRows];

  PhiloxRows(const Dropout& dropout, uint32_t row, int64_t rows) {
    for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
      key0[round] = static_cast<uint32_t>(dropout.key0 + round * kPhiloxBump0);
      key1[round] = static_cast<uint32_t>(dropout.key1 + round * kPhiloxBump1);
    }
    const uint64_t layer = static_cast<uint64_t>(kPhiloxMultiplier1) * dropout.layer;
    layer_low = static_cast<uint32_t>(layer);
    for (int64_t i = 0; i < rows; ++i) {
      const uint32_t first =
          static_cast<uint32_t>(layer >> 32) ^ (row + static_cast<uint32_t>(i)) ^ dropout.key0;
      const uint64_t product = static_cast<uint64_t>(kPhiloxMultiplier0) * first;
      high[i] = (product >> 32) ^ key1[1];
      low[i] = static_cast<uint32_t>(product);
    }
  }
};

inline __m512i high_half(__m512i v) { return _mm512_srli_epi64(v, 32); }

// The part of the first three rounds that depends on the columns alone: eight counters, 64 columns.
struct PhiloxColumns {
  __m512i second, third0, third2, third3;

  PhiloxColumns(const PhiloxRows& rows, const Dropout& dropout, uint32_t counter) {
    const __m512i m0 = _mm512_set1_epi64(kPhiloxMultiplier0);
    const __m512i m1 = _mm512_set1_epi64(kPhiloxMultiplier1);
    // even lanes hold counters 0..3 and odd lanes 4..7, so that unpacking the results yields them in order
    const __m512i c0 =
        _mm512_add_epi64(_mm512_set1_epi64(counter), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
    second = _mm512_mul_epu32(m0, c0);
    const __m512i c2 = _mm512_xor_si512(high_half(second), _mm512_set1_epi64(dropout.step ^ dropout.key1));
    const __m512i p1 = _mm512_mul_epu32(m1, c2);
    const __m512i next0 = _mm512_xor_si512(high_half(p1), _mm512_set1_epi64(rows.layer_low ^ rows.key0[1]));
    third3 = _mm512_mul_epu32(m0, next0);
    third0 = _mm512_xor_si512(p1, _mm512_set1_epi64(rows.key0[2]));
    third2 = _mm512_xor_si512(high_half(third3), _mm512_set1_epi64(rows.key1[2]));
  }
};

// Keep bits of kRows neighbouring rows for one word of 64 columns; the rows hide each other's latency.
template <int kRows>
inline void philox_words(const PhiloxRows& rows, const PhiloxColumns& columns, int64_t row, __m512i threshold,
                         uint64_t* bits, int64_t bits_stride) {
  const __m512i m0 = _mm512_set1_epi64(kPhiloxMultiplier0);
  const __m512i m1 = _mm512_set1_epi64(kPhiloxMultiplier1);
  __m512i c0[kRows], c1[kRows], c2[kRows], c3[kRows];
  for (int i = 0; i < kRows; ++i) {
    const __m512i second = _mm512_xor_si512(columns.second, _mm512_set1_epi64(rows.high[row + i]));
    c1[i] = _mm512_mul_epu32(m1, second);
    c0[i] = _mm512_xor_si512(high_half(c1[i]), columns.third0);
    c2[i] = _mm512_xor_si512(columns.third2, _mm512_set1_epi64(rows.low[row + i]));
    c3[i] = columns.third3;
  }
  static_assert(kPhiloxRounds == 7);
#pragma GCC unroll 4
  for (int round = 3; round < kPhiloxRounds; ++round) {
    const __m512i key0 = _mm512_set1_epi64(rows.key0[round]);
    const __m512i key1 = _mm512_set1_epi64(rows.key1[round]);
    for (int i = 0; i < kRows; ++i) {
      const __m512i p0 = _mm512_mul_epu32(m0, c0[i]);
      const __m512i p1 = _mm512_mul_epu32(m1, c2[i]);
      c0[i] = _mm512_ternarylogic_epi64(high_half(p1), c1[i], key0, 0x96);
      c2[i] = _mm512_ternarylogic_epi64(high_half(p0), c3[i], key1, 0x96);
      c1[i] = p1;
      c3[i] = p0;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    const __m512i w01 = _mm512_mask_mov_epi32(c0[i], 0xAAAA, _mm512_slli_epi64(c1[i], 32));
    const __m512i w23 = _mm512_mask_mov_epi32(c2[i], 0xAAAA, _mm512_slli_epi64(c3[i], 32));
    const uint64_t low = _mm512_cmpge_epu16_mask(_mm512_unpacklo_epi64(w01, w23), threshold);
    const uint64_t high = _mm512_cmpge_epu16_mask(_mm512_unpackhi_epi64(w01, w23), threshold);
    bits[i * bits_stride] = low | (high << 32);
  }
}

struct FetchNothing {
  void operator()(int64_t, int64_t, int64_t) const {}
};

// rows <= kBlockRows. `fetch(row, count, word)` may fetch what is needed next: this takes arithmetic only.
template <class Fetch = FetchNothing>
void keep_bits_block(const Dropout& dropout, uint32_t row, int64_t rows, int64_t word_begin, int64_t words,
                     uint64_t* bits, int64_t stride, const Fetch& fetch = {}) {
  const PhiloxRows row_state(dropout, row, rows);
  const __m512i threshold = _mm512_set1_epi16(static_cast<int16_t>(dropout.threshold));
  for (int64_t w = 0; w < words; ++w) {
    const PhiloxColumns columns(row_state, dropout, static_cast<uint32_t>((word_begin + w) * 8));
    int64_t i = 0;
    for (; i + 6 <= rows; i += 6) {
      fetch(i, 6, w);
      philox_words<6>(row_state, columns, i, threshold, bits + i * stride + w, stride);
    }
    for (; i + 4 <= rows; i += 4) {
      fetch(i, 4, w);
      philox_words<4>(row_state, columns, i, threshold, bits + i * stride + w, stride);
    }
    for (; i < rows; ++i) {
      fetch(i, 1, w);
      philox_words<1>(row_state, columns, i, threshold, bits + i * stride + w, stride);
    }
  }
}

}  // namespace mlora::cpu::MLORA_ISA
