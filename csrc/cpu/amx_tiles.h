// Matrix tiles (AMX): their products, and how bf16 rows are laid out for them.
//
// A tile holds 16 rows of 64 bytes. C [16, 16] += A [16, 32] B [32, 16], where a row of A is 32 bf16, a row
// of B 16 pairs of them along the sum, and a row of C 16 fp32.
#pragma once

#include <immintrin.h>

#include "cpu/blocks.h"

namespace mlora::cpu::MLORA_ISA {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileColumns = 32;  // of A, and of two tiles of C: the even columns, then the odd ones
constexpr int64_t kTileUnits = 256;   // 32-bit units in a tile
constexpr int64_t kTileBytes = 1024;

inline int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

alignas(64) constexpr uint8_t kTileConfig[64] = {
    1,  0,  0,  0,  0,  0,  0,  0,  0,  0, 0,  0, 0,  0, 0,  0,  // palette
    64, 0,  64, 0,  64, 0,  64, 0,  64, 0, 64, 0, 64, 0, 64, 0,  // bytes in a row of each tile
    0,  0,  0,  0,  0,  0,  0,  0,  0,  0, 0,  0, 0,  0, 0,  0,
    16, 16, 16, 16, 16, 16, 16, 16,  // rows of each tile
};

// This thread's tiles for the life of a task.
class Tiles {
 public:
  Tiles() { _tile_loadconfig(kTileConfig); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Tiles in memory, and how many lie between neighbours and between steps along the sum.
struct TileGrid {
  const void* data;
  int64_t next;
  int64_t step;
  const char* at(int64_t tiles) const { return static_cast<const char*>(data) + tiles * kTileBytes; }
};

// Clears the four tiles of sums, after all stores: gcc does not know that loading a tile reads memory.
inline void begin_product() {
  __asm__ volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// A column of kHeights tiles: c[h] (+)= sum over steps of a[h] b.
template <int kHeights>
void multiply_column(const TileGrid& a, const TileGrid& b, int64_t steps, float* c, int64_t c_next,
                     bool add) {
  begin_product();
  if (add) {
    _tile_loadd(0, c, 64);
    if constexpr (kHeights > 1) _tile_loadd(1, c + c_next * kTileUnits, 64);
    if constexpr (kHeights > 2) _tile_loadd(2, c + 2 * c_next * kTileUnits, 64);
    if constexpr (kHeights > 3) _tile_loadd(3, c + 3 * c_next * kTileUnits, 64);
  }
  const char* a0 = a.at(0);
  const char* b0 = b.at(0);
  for (int64_t k = 0; k < steps; ++k, a0 += a.step * kTileBytes, b0 += b.step * kTileBytes) {
    _tile_loadd(6, b0, 64);
    _tile_loadd(4, a0, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kHeights > 1) {
      _tile_loadd(5, a0 + a.next * kTileBytes, 64);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (kHeights > 2) {
      _tile_loadd(4, a0 + 2 * a.next * kTileBytes, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kHeights > 3) {
      _tile_loadd(5, a0 + 3 * a.next * kTileBytes, 64);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, c, 64);
  if constexpr (kHeights > 1) _tile_stored(1, c + c_next * kTileUnits, 64);
  if constexpr (kHeights > 2) _tile_stored(2, c + 2 * c_next * kTileUnits, 64);
  if constexpr (kHeights > 3) _tile_stored(3, c + 3 * c_next * kTileUnits, 64);
}

inline void multiply_column(int64_t heights, const TileGrid& a, const TileGrid& b, int64_t steps, float* c,
                            int64_t c_next, bool add) {
  switch (heights) {
    case 4:
      return multiply_column<4>(a, b, steps, c, c_next, add);
    case 3:
      return multiply_column<3>(a, b, steps, c, c_next, add);
    case 2:
      return multiply_column<2>(a, b, steps, c, c_next, add);
    default:
      return multiply_column<1>(a, b, steps, c, c_next, add);
  }
}

// A row of kGroups pairs of tiles, even and odd columns: c[g] (+)= sum over steps of a b[g]. A group of b
// begins b_group tiles, a group of c c_group tiles after the one before.
template <int kGroups>
void multiply_row(const TileGrid& a, const TileGrid& b, int64_t b_group, int64_t steps, float* c,
                  int64_t c_group, bool add) {
  begin_product();
  float* c2 = c + c_group * kTileUnits;
  if (add) {
    _tile_loadd(0, c, 64);
    _tile_loadd(1, c + kTileUnits, 64);
    if constexpr (kGroups > 1) {
      _tile_loadd(2, c2, 64);
      _tile_loadd(3, c2 + kTileUnits, 64);
    }
  }
  const char* a0 = a.at(0);
  const char* b0 = b.at(0);
  for (int64_t k = 0; k < steps; ++k, a0 += a.step * kTileBytes, b0 += b.step * kTileBytes) {
    _tile_loadd(4, a0, 64);
    _tile_loadd(6, b0, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b0 + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kGroups > 1) {
      _tile_loadd(6, b0 + b_group * kTileBytes, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, b0 + (b_group + 1) * kTileBytes, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, c + kTileUnits, 64);
  if constexpr (kGroups > 1) {
    _tile_stored(2, c2, 64);
    _tile_stored(3, c2 + kTileUnits, 64);
  }
}

// Columns [c, c + 32) of one row; dropped elements and those beyond the row's end are zero.
inline __m512i load_kept(const BF16* row, int64_t c, int64_t cols, const uint64_t* keep) {
  const __mmask32 valid = cols - c < 32 ? Simd::first32(cols - c) : ~__mmask32{0};
  const __mmask32 mask = keep ? valid & static_cast<__mmask32>(keep[c >> 6] >> (c & 63)) : valid;
  return _mm512_maskz_loadu_epi16(mask, row + c);
}

inline __m512i load_columns(const BF16* row, int64_t c, int64_t cols) {
  return load_kept(row, c, cols, nullptr);
}

inline __m512i load_columns(const float* row, int64_t c, int64_t cols) {
  const __mmask32 valid = cols - c < 32 ? Simd::first32(cols - c) : ~__mmask32{0};
  const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(valid), row + c);
  const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(valid >> 16), row + c + 16);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Rows as tiles of A: [rows / 16][columns / 32].
inline void stage_tiles(const BF16* rows, int64_t stride, int64_t count, int64_t cols, const uint64_t* keep,
                        int64_t keep_stride, BF16* target) {
  const int64_t steps = units_of(cols, kTileColumns);
  for (int64_t i = 0; i < padded(count, kTileRows); ++i) {
    BF16* out = target + (i / kTileRows * steps * kTileRows + i % kTileRows) * kTileColumns;
    const uint64_t* bits = keep ? keep + i * keep_stride : nullptr;
    for (int64_t c = 0; c < cols; c += kTileColumns, out += kTileRows * kTileColumns) {
      _mm512_store_si512(out,
                         i < count ? load_kept(rows + i * stride, c, cols, bits) : _mm512_setzero_si512());
    }
  }
}

// Two rows of 32 columns as units of a tile's row: the even columns, and a tile further the odd ones.
inline void store_pair(__m512i first, __m512i second, uint32_t* target) {
  const __m512i low = _mm512_set1_epi32(0xffff);
  // 0xE4 selects the first operand where the third is set, and the second elsewhere
  _mm512_store_si512(target, _mm512_ternarylogic_epi32(first, _mm512_slli_epi32(second, 16), low, 0xE4));
  _mm512_store_si512(target + kTileUnits,
                     _mm512_ternarylogic_epi32(_mm512_srli_epi32(first, 16), second, low, 0xE4));
}

// Pairs of rows as tiles of B: [columns / 32][rows / 32][even, odd].
inline void stage_pairs(const BF16* rows, int64_t stride, int64_t count, int64_t cols, const uint64_t* keep,
                        int64_t keep_stride, uint32_t* target) {
  const int64_t pairs = padded(count, kTileColumns) / 2;
  for (int64_t p = 0; p < pairs; ++p) {
    const BF16* first = rows + 2 * p * stride;
    const uint64_t* bits = keep ? keep + 2 * p * keep_stride : nullptr;
    const uint64_t* next_bits = keep ? bits + keep_stride : nullptr;
    uint32_t* out = target + p / kTileRows * 2 * kTileUnits + p % kTileRows * 16;
    for (int64_t c = 0; c < cols; c += kTileColumns, out += pairs / kTileRows * 2 * kTileUnits) {
      store_pair(2 * p < count ? load_kept(first, c, cols, bits) : _mm512_setzero_si512(),
                 2 * p + 1 < count ? load_kept(first + stride, c, cols, next_bits) : _mm512_setzero_si512(),
                 out);
    }
  }
}

// Transposes 16 x 16 units.
inline void transpose(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Ranks [first, first + 16) and columns [c, c + 32) as a tile of B whose sum runs along the columns.
template <typename T>
void pack_along_columns(const T* rows, int64_t stride, int64_t ranks, int64_t c, int64_t cols,
                        uint32_t* tile) {
  __m512i r[16];
  for (int64_t j = 0; j < 16; ++j) {
    r[j] = j < ranks ? load_columns(rows + j * stride, c, cols) : _mm512_setzero_si512();
  }
  transpose(r);
  for (int64_t j = 0; j < 16; ++j) {
    _mm512_store_si512(tile + j * 16, r[j]);
  }
}

// Ranks [first, first + 32) and columns [c, c + 32) as two tiles of B whose sum runs along the rank: even
// columns, odd columns.
template <typename T>
void pack_along_rank(const T* rows, int64_t stride, int64_t ranks, int64_t c, int64_t cols, uint32_t* tiles) {
  for (int64_t j = 0; j < kTileColumns; j += 2, tiles += 16) {
    store_pair(j < ranks ? load_columns(rows + j * stride, c, cols) : _mm512_setzero_si512(),
               j + 1 < ranks ? load_columns(rows + (j + 1) * stride, c, cols) : _mm512_setzero_si512(),
               tiles);
  }
}

// Rows [count, rank] transposed, as tiles of A whose sum runs along the rows: [rank / 16][rows / 32].
inline void stage_transposed(const BF16* rows, int64_t stride, int64_t count, int64_t rank,
                             uint32_t* target) {
  for (int64_t j = 0; j < rank; j += kTileRows) {
    const __mmask16 valid = rank - j < 16 ? Simd::first(rank - j) : ~__mmask16{0};
    const auto load = [&](int64_t i) {
      return i < count ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(valid, rows + i * stride + j))
                       : _mm512_setzero_si512();
    };
    for (int64_t begin = 0; begin < count; begin += kTileColumns, target += kTileUnits) {
      __m512i r[16];
      for (int64_t p = 0; p < 16; ++p) {
        r[p] = _mm512_or_si512(load(begin + 2 * p), _mm512_slli_epi32(load(begin + 2 * p + 1), 16));
      }
      transpose(r);
      for (int64_t p = 0; p < 16; ++p) {
        _mm512_store_si512(target + p * 16, r[p]);
      }
    }
  }
}

}  // namespace mlora::cpu::MLORA_ISA
