// Pairs of bf16 numbers along the sum: AVX-512's BF16 dot products.
#pragma once

#include "cpu/prefetch.h"
#include "cpu/simd_avx512.h"

namespace mlora::cpu::MLORA_ISA {

// Products of bf16 pairs, summed in fp32: one 32-bit lane holds two neighbours along the sum.
struct BF16Dot {
  using Element = BF16;
  using Unit = uint32_t;
  static constexpr int kUnits = 2;
  static Simd::Vec fma(Simd::Vec a, Simd::Vec b, Simd::Vec c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static Simd::Vec load(const BF16* p) { return _mm512_loadu_ps(p); }
  static Simd::Vec load(const BF16* p, int64_t n) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(Simd::first32(n), p));
  }
  static Simd::Vec broadcast(const uint32_t* p) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*p)));
  }
  static Simd::Vec load_units(const uint32_t* p) { return _mm512_loadu_ps(p); }
  static Simd::Vec load_units(const uint32_t* p, int64_t n) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi32(Simd::first(n), p));
  }
};

// Interleave columns of two rows: target[c] = (first[c], second[c]); dropped elements become zero.
inline void interleave(const BF16* first, const BF16* second, int64_t cols, const uint64_t* keep0,
                       const uint64_t* keep1, uint32_t* target) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                       38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  int64_t c = 0;
  for (; c + 32 <= cols; c += 32) {
    const __mmask32 m0 = keep0 ? static_cast<__mmask32>(keep0[c >> 6] >> (c & 63)) : ~__mmask32{0};
    const __mmask32 m1 = keep1 ? static_cast<__mmask32>(keep1[c >> 6] >> (c & 63)) : ~__mmask32{0};
    const __m512i a = _mm512_maskz_mov_epi16(m0, _mm512_loadu_si512(first + c));
    const __m512i b =
        second ? _mm512_maskz_mov_epi16(m1, _mm512_loadu_si512(second + c)) : _mm512_setzero_si512();
    _mm512_storeu_si512(target + c, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(target + c + 16, _mm512_permutex2var_epi16(a, high, b));
  }
  if (c < cols) {
    const int64_t n = cols - c;
    const __mmask32 valid = Simd::first32(n);
    const __mmask32 m0 = keep0 ? valid & static_cast<__mmask32>(keep0[c >> 6] >> (c & 63)) : valid;
    const __mmask32 m1 = keep1 ? valid & static_cast<__mmask32>(keep1[c >> 6] >> (c & 63)) : valid;
    const __m512i a = _mm512_maskz_loadu_epi16(m0, first + c);
    const __m512i b = second ? _mm512_maskz_loadu_epi16(m1, second + c) : _mm512_setzero_si512();
    _mm512_mask_storeu_epi32(target + c, Simd::first(n < 16 ? n : 16), _mm512_permutex2var_epi16(a, low, b));
    if (n > 16) {
      _mm512_mask_storeu_epi32(target + c + 16, Simd::first(n - 16), _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

// Units of two rows with the even columns of each 32 before the odd ones, as AddPairsTo reads them. Writes
// whole groups of 32.
inline void split_units(const BF16* first, const BF16* second, int64_t cols, uint32_t* target) {
  const __m512i even = _mm512_set1_epi32(0xffff);
  for (int64_t c = 0; c < cols; c += 32) {
    const __mmask32 valid = Simd::first32(cols - c < 32 ? cols - c : 32);
    const __m512i a = _mm512_maskz_loadu_epi16(valid, first + c);
    const __m512i b = second ? _mm512_maskz_loadu_epi16(valid, second + c) : _mm512_setzero_si512();
    // 0xE4 selects the first operand where the third is set, and the second elsewhere
    _mm512_storeu_si512(target + c, _mm512_ternarylogic_epi32(a, _mm512_slli_epi32(b, 16), even, 0xE4));
    _mm512_storeu_si512(target + c + 16, _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, even, 0xE4));
  }
}

// rows += sum for rows of bf16, 32 columns at a time: the even ones, then the odd ones, so that widening and
// rounding move lanes in one permutation only. Sums begin with what is there: fp32 rounds far below bf16.
struct AddPairsTo {
  static constexpr int kVecs = 2;
  BF16* rows;
  int64_t stride;
  BF16* at(int64_t row, int64_t col) const { return rows + row * stride + col; }
  void prefetch(int64_t row, int64_t col, int64_t cols) const { prefetch_row(at(row, col), cols); }
  void begin(int64_t row, int64_t col, Simd::Vec* acc) const { widen(_mm512_loadu_si512(at(row, col)), acc); }
  void begin(int64_t row, int64_t col, Simd::Vec* acc, int64_t n) const {
    widen(_mm512_maskz_loadu_epi16(Simd::first32(n), at(row, col)), acc);
  }
  void end(int64_t row, int64_t col, const Simd::Vec* sum) const {
    _mm512_storeu_si512(at(row, col), narrow(sum));
  }
  void end(int64_t row, int64_t col, const Simd::Vec* sum, int64_t n) const {
    _mm512_mask_storeu_epi16(at(row, col), Simd::first32(n), narrow(sum));
  }

 protected:
  static void widen(__m512i pairs, Simd::Vec* acc) {
    acc[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    acc[1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static __m512i narrow(const Simd::Vec* sum) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                           7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(sum[1], sum[0])));
  }
};

// The same where the keep bit is set; columns count from the first of the bits.
struct AddPairsKept : AddPairsTo {
  const uint64_t* bits;
  int64_t bits_stride;
  __mmask32 kept(int64_t row, int64_t col) const {
    return static_cast<__mmask32>(bits[row * bits_stride + (col >> 6)] >> (col & 63));
  }
  void end(int64_t row, int64_t col, const Simd::Vec* sum) const {
    const __m512i old = _mm512_loadu_si512(at(row, col));
    _mm512_storeu_si512(at(row, col), _mm512_mask_mov_epi16(old, kept(row, col), narrow(sum)));
  }
  void end(int64_t row, int64_t col, const Simd::Vec* sum, int64_t n) const {
    _mm512_mask_storeu_epi16(at(row, col), kept(row, col) & Simd::first32(n), narrow(sum));
  }
};

// Copy a row; dropped elements become zero.
inline void copy_kept(const BF16* source, int64_t cols, const uint64_t* keep, BF16* target) {
  int64_t c = 0;
  for (; c + 64 <= cols; c += 64) {
    const uint64_t bits = keep ? keep[c >> 6] : ~uint64_t{0};
    const __m512i low = _mm512_loadu_si512(source + c);
    const __m512i high = _mm512_loadu_si512(source + c + 32);
    _mm512_storeu_si512(target + c, _mm512_maskz_mov_epi16(static_cast<__mmask32>(bits), low));
    _mm512_storeu_si512(target + c + 32, _mm512_maskz_mov_epi16(static_cast<__mmask32>(bits >> 32), high));
  }
  for (; c < cols; c += 32) {
    const __mmask32 valid = Simd::first32(cols - c < 32 ? cols - c : 32);
    const __mmask32 mask = keep ? valid & static_cast<__mmask32>(keep[c >> 6] >> (c & 63)) : valid;
    _mm512_mask_storeu_epi16(target + c, valid, _mm512_maskz_loadu_epi16(mask, source + c));
  }
}

}  // namespace mlora::cpu::MLORA_ISA
