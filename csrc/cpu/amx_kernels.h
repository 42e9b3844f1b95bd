// The kernels of bf16 on matrix tiles (AMX), in the form of the table in kernels.h.
#pragma once

#include "cpu/amx_tiles.h"

namespace mlora::cpu::MLORA_ISA {

constexpr int64_t kStagedColumns = 256;  // of x or dy, that are laid out at once
constexpr int64_t kAddedColumns = 64;    // of y or dx, that are added to at once

inline int64_t steps_of(int64_t elements) { return units_of(elements, kTileColumns); }
inline int64_t panels_of(int64_t rank) { return units_of(rank, kTileRows); }

static_assert(kBlockRows == 4 * kTileRows, "multiply_column takes up to four tiles of rows");
static_assert(kAddedColumns == kWordColumns, "one word of keep bits for the columns that are added at once");
static_assert(kStagedColumns % kAddedColumns == 0);

// Sums, rows and tiles of s or ds, transposed ones; tiles and pairs of the staged columns, keep bits, added
// columns.
inline int64_t amx_scratch_bytes(int64_t max_rank) {
  const int64_t ranks = padded(max_rank, kTileRows) * 6 + padded(max_rank, kTileColumns) * 4;
  const int64_t staged = kStagedColumns * 4 + kStagedColumns / 8 + 2 * kAddedColumns * 4;
  return kBlockRows * (ranks + staged) + 64;
}

inline int64_t amx_packed_bytes(Along along, int64_t rank, int64_t cols) {
  const int64_t tiles =
      along == Along::kColumns ? steps_of(cols) * panels_of(rank) : steps_of(cols) * steps_of(rank) * 2;
  return tiles * kTileBytes;
}

// One tile, or two, of an adapter's matrix: ranks from `rank`, columns [c, end).
template <typename T>
void amx_pack_tile(Along along, const T* rows, int64_t stride, int64_t ranks, int64_t c, int64_t end,
                   uint32_t* target) {
  if (along == Along::kColumns) {
    pack_along_columns(rows, stride, ranks, c, end, target);
  } else {
    pack_along_rank(rows, stride, ranks, c, end, target);
  }
}

// Rows of A, or of B transposed, as tiles of B: along the columns [columns / 32][rank / 16], along the rank
// [columns / 32][rank / 32][even, odd].
inline void amx_pack(const PackArgs& args) {
  const auto& [source, along, rank, cols, begin, end, memory] = args;
  const int64_t high = along == Along::kColumns ? kTileRows : kTileColumns;
  const int64_t size = along == Along::kColumns ? kTileUnits : 2 * kTileUnits;
  uint32_t* target = static_cast<uint32_t*>(memory) + begin / kTileColumns * units_of(rank, high) * size;
  for (int64_t c = begin; c < end; c += kTileColumns) {
    for (int64_t j = 0; j < rank; j += high, target += size) {
      const int64_t offset = j * source.row_stride;
      if (source.col_stride == 1 && source.type == Scalar::kBFloat16) {
        amx_pack_tile(along, static_cast<const BF16*>(source.data) + offset, source.row_stride, rank - j, c,
                      end, target);
      } else if (source.col_stride == 1 && source.type == Scalar::kFloat) {
        amx_pack_tile(along, static_cast<const float*>(source.data) + offset, source.row_stride, rank - j, c,
                      end, target);
      } else {
        BF16 rows[kTileColumns * kTileColumns];
        const int64_t n = end - c < kTileColumns ? end - c : kTileColumns;
        for (int64_t i = 0; i < high && j + i < rank; ++i) {
          convert_row(source, j + i, c, n, rows + i * kTileColumns);
        }
        amx_pack_tile(along, rows, kTileColumns, rank - j, 0, n, target);
      }
    }
  }
}

// The lines of rows that are fetched while their keep bits are computed; no rows: nothing.
struct FetchRows {
  const BF16* rows;
  int64_t stride;
  void operator()(int64_t row, int64_t count, int64_t word) const {
    for (int64_t i = row; rows && i < row + count; ++i) {
      const BF16* columns = rows + i * stride + word * kWordColumns;
      __builtin_prefetch(columns);
      __builtin_prefetch(columns + kTileColumns);
    }
  }
};

// sums [rows / 16][rank / 16] (+)= columns [c, c + n) of drop(rows) F^T, for one block of rows.
inline void amx_shrink(const BF16* rows, int64_t stride, int64_t count, int64_t c, int64_t n,
                       const void* factor, int64_t panels, const uint64_t* keep, int64_t keep_stride,
                       BF16* staged, float* sums) {
  stage_tiles(rows + c, stride, count, n, keep, keep_stride, staged);
  const int64_t steps = steps_of(n);
  const char* b = static_cast<const char*>(factor) + c / kTileColumns * panels * kTileBytes;
  for (int64_t p = 0; p < panels; ++p) {
    multiply_column(units_of(count, kTileRows), {staged, steps, 1}, {b + p * kTileBytes, 0, panels}, steps,
                    sums + p * kTileUnits, panels, c > 0);
  }
}

// Rows of bf16 = scale * sums.
inline void write_rows(const float* sums, int64_t count, int64_t rank, float scale, BF16* rows,
                       int64_t stride) {
  const int64_t panels = panels_of(rank);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t n = rank - p * kTileRows < kTileRows ? rank - p * kTileRows : kTileRows;
      const float* from = sums + (i / kTileRows * panels + p) * kTileUnits + i % kTileRows * 16;
      scale_row(from, n, scale, rows + i * stride + p * kTileRows);
    }
  }
}

// 32 columns of one row += even and odd columns; dropped elements stay as they are.
inline void add_columns(BF16* at, int64_t n, __mmask32 kept, const float* even, const float* odd) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __mmask32 valid = n < 32 ? Simd::first32(n) : ~__mmask32{0};
  const __m512i old = n < 32 ? _mm512_maskz_loadu_epi16(valid, at) : _mm512_loadu_si512(at);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512 first = _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(old, 16)), _mm512_load_ps(even));
  const __m512 second = _mm512_add_ps(_mm512_castsi512_ps(_mm512_and_si512(old, high)), _mm512_load_ps(odd));
  const __m512i pairs = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  const __m512i sum = _mm512_mask_permutexvar_epi16(old, kept, order, pairs);
  if (n < 32) {
    _mm512_mask_storeu_epi16(at, valid, sum);
  } else {
    _mm512_storeu_si512(at, sum);
  }
}

// rows += keep(s F) for one block: s as tiles of A, F packed along the rank. While 64 columns of 32 rows are
// added, the products of the next ones are under way.
inline void amx_expand(const BF16* s, int64_t count, int64_t rank, const void* factor, int64_t cols,
                       const uint64_t* bits, int64_t words, BF16* rows, int64_t stride, Scratch scratch) {
  constexpr int64_t kRows = 2 * kTileRows;
  constexpr int64_t kGroups = kAddedColumns / kTileColumns;
  const int64_t steps = steps_of(rank);
  float* buffers[2] = {scratch.take<float>(kRows * kAddedColumns),
                       scratch.take<float>(kRows * kAddedColumns)};
  const auto width = [&](int64_t c) { return cols - c < kAddedColumns ? cols - c : kAddedColumns; };
  for (int64_t first = 0; first < count; first += kRows) {
    const int64_t m = count - first < kRows ? count - first : kRows;
    const TileGrid a{s + first * steps * kTileColumns, steps, 1};
    const auto multiply = [&](int64_t c, float* sums) {
      for (int64_t g = 0; g < steps_of(width(c)); ++g) {
        const char* b = static_cast<const char*>(factor) + (c / kTileColumns + g) * steps * 2 * kTileBytes;
        for (int64_t odd = 0; odd < 2; ++odd) {
          multiply_column(units_of(m, kTileRows), a, {b + odd * kTileBytes, 0, 2}, steps,
                          sums + (2 * g + odd) * kTileUnits, 2 * kGroups, false);
        }
      }
    };
    multiply(0, buffers[0]);
    for (int64_t c = 0, turn = 0; c < cols; c += kAddedColumns, turn ^= 1) {
      if (c + kAddedColumns < cols) {
        multiply(c + kAddedColumns, buffers[turn ^ 1]);
      }
      for (int64_t i = 0; i < m; ++i) {
        const float* from = buffers[turn] + i / kTileRows * 2 * kGroups * kTileUnits + i % kTileRows * 16;
        BF16* row = rows + (first + i) * stride + c;
        const uint64_t kept = bits ? bits[(first + i) * words + (c >> 6)] : ~uint64_t{0};
        for (int64_t g = 0; g < width(c); g += kTileColumns, from += 2 * kTileUnits) {
          prefetch_line(row + g + kAddedColumns);
          add_columns(row + g, width(c) - g, static_cast<__mmask32>(kept >> g), from, from + kTileUnits);
        }
      }
    }
  }
}

inline void amx_forward(const ForwardArgs& args) {
  const Tiles tiles;
  const AdapterView& adapter = *args.adapter;
  const RowBlock& block = *args.block;
  const int64_t rank = adapter.rank;
  constexpr int64_t kWords = kStagedColumns / kWordColumns;
  Scratch scratch(args.scratch);
  const BF16* x = static_cast<const BF16*>(args.x) + block.begin * args.x_stride;
  float* sums = scratch.take<float>(kBlockRows * padded(rank, kTileRows));
  BF16* staged = scratch.take<BF16>(kBlockRows * kStagedColumns);
  uint64_t* bits = scratch.take<uint64_t>(kBlockRows * kWords);
  for (int64_t c = 0; c < args.d_in; c += kStagedColumns) {
    const int64_t n = args.d_in - c < kStagedColumns ? args.d_in - c : kStagedColumns;
    const uint64_t* keep = nullptr;
    if (adapter.dropout.threshold) {
      keep_bits_block(adapter.dropout, block.philox_row, block.rows, c / kWordColumns, words_of(n), bits,
                      kWords, FetchRows{x + c, args.x_stride});
      keep = bits;
    }
    amx_shrink(x, args.x_stride, block.rows, c, n, adapter.a, panels_of(rank), keep, kWords, staged, sums);
  }
  BF16* s = static_cast<BF16*>(args.s) + block.begin * args.s_stride;
  write_rows(sums, block.rows, rank, adapter.scaling * adapter.dropout.keep_scale, s, args.s_stride);
  for (int64_t i = 0; i < block.rows && rank < args.s_stride; ++i) {
    std::memset(static_cast<void*>(s + i * args.s_stride + rank), 0,
                static_cast<size_t>(args.s_stride - rank) * 2);
  }
  BF16* s_tiles = scratch.take<BF16>(kBlockRows * padded(rank, kTileColumns));
  stage_tiles(s, args.s_stride, block.rows, rank, nullptr, 0, s_tiles);
  amx_expand(s_tiles, block.rows, rank, adapter.b, args.d_out, nullptr, 0,
             static_cast<BF16*>(args.y) + block.begin * args.y_stride, args.y_stride, scratch);
}

// The sums of a gradient: [columns / 32][rank / 16][even, odd] tiles of C.
inline int64_t amx_sums_size(int64_t rank, int64_t cols) {
  return steps_of(cols) * panels_of(rank) * 2 * kTileUnits;
}

// sums (+)= the outer product of a block: `left` [rows, rank] as transposed tiles of A, `right` its rows as
// pairs.
inline void amx_add_outer(const uint32_t* left, int64_t rank, int64_t rows, const uint32_t* right,
                          int64_t cols, float* sums, bool add) {
  const int64_t panels = panels_of(rank);
  const int64_t steps = steps_of(rows);
  const int64_t groups = steps_of(cols);
  for (int64_t g = 0; g < groups; g += 2) {
    for (int64_t j = 0; j < panels; ++j) {
      const TileGrid a{left + j * steps * kTileUnits, 0, 1};
      const TileGrid b{right + g * steps * 2 * kTileUnits, 1, 2};
      float* c = sums + (g * panels + j) * 2 * kTileUnits;
      if (g + 1 < groups) {
        multiply_row<2>(a, b, steps * 2, steps, c, panels * 2, add);
      } else {
        multiply_row<1>(a, b, 0, steps, c, 0, add);
      }
    }
  }
}

// The sums of a gradient's groups, in their order.
inline void amx_write_gradient(const GradientArgs& args) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  constexpr int64_t kColumns = 256;
  alignas(64) float row[kColumns];
  const int64_t panels = panels_of(args.rank);
  for (int64_t j = 0; j < args.rank; ++j) {
    for (int64_t c = args.begin; c < args.end; c += kColumns) {
      const int64_t n = args.end - c < kColumns ? args.end - c : kColumns;
      for (int64_t k = 0; k < n; k += kTileColumns) {
        const float* sums = args.sums + ((c + k) / kTileColumns * panels + j / kTileRows) * 2 * kTileUnits +
                            j % kTileRows * 16;
        __m512 even = _mm512_setzero_ps();
        __m512 odd = _mm512_setzero_ps();
        for (int64_t group = 0; group < args.groups; ++group, sums += args.next) {
          even = _mm512_add_ps(even, _mm512_load_ps(sums));
          odd = _mm512_add_ps(odd, _mm512_load_ps(sums + kTileUnits));
        }
        _mm512_store_ps(row + k, _mm512_permutex2var_ps(even, low, odd));
        _mm512_store_ps(row + k + 16, _mm512_permutex2var_ps(even, high, odd));
      }
      if (args.add) {
        add_row(args.grad, j, c, n, row);
      }
      write_row(row, n, args.grad, j, c);
    }
  }
}

inline void amx_backward(const BackwardArgs& args) {
  const Tiles tiles;
  const AdapterView& adapter = *args.adapter;
  const int64_t rank = adapter.rank;
  const int64_t panels = panels_of(rank);
  const int64_t ds_steps = steps_of(rank);
  constexpr int64_t kWords = kStagedColumns / kWordColumns;
  Scratch scratch(args.scratch);
  float* sums = scratch.take<float>(kBlockRows * padded(rank, kTileRows));
  BF16* ds_rows = scratch.take<BF16>(kBlockRows * rank);
  BF16* ds = scratch.take<BF16>(kBlockRows * padded(rank, kTileColumns));
  uint32_t* left = scratch.take<uint32_t>(kBlockRows * padded(rank, kTileRows) / 2);
  uint32_t* pairs = scratch.take<uint32_t>(kBlockRows * kStagedColumns / 2);
  BF16* staged = scratch.take<BF16>(kBlockRows * kStagedColumns);
  uint64_t* bits = scratch.take<uint64_t>(kBlockRows * kWords);
  int32_t index = args.first_block;
  for (int64_t i = 0; i < args.block_count; ++i, index = args.blocks[index].next) {
    const RowBlock& block = args.blocks[index];
    const BF16* dy = static_cast<const BF16*>(args.dy) + block.begin * args.dy_stride;
    const BF16* x = static_cast<const BF16*>(args.x) + block.begin * args.x_stride;
    if (args.db) {
      stage_transposed(static_cast<const BF16*>(args.s) + block.begin * args.s_stride, args.s_stride,
                       block.rows, rank, left);
    }
    for (int64_t c = 0; c < args.d_out; c += kStagedColumns) {
      const int64_t n = args.d_out - c < kStagedColumns ? args.d_out - c : kStagedColumns;
      if (args.dx || args.da) {
        amx_shrink(dy, args.dy_stride, block.rows, c, n, adapter.b, panels, nullptr, 0, staged, sums);
      }
      if (args.db) {
        stage_pairs(dy + c, args.dy_stride, block.rows, n, nullptr, 0, pairs);
        amx_add_outer(left, rank, block.rows, pairs, n, args.db + amx_sums_size(rank, c), i > 0);
      }
    }
    if (!args.dx && !args.da) {
      continue;
    }
    write_rows(sums, block.rows, rank, adapter.scaling * adapter.dropout.keep_scale, ds_rows, rank);
    stage_tiles(ds_rows, rank, block.rows, rank, nullptr, 0, ds);
    stage_transposed(ds_rows, rank, block.rows, rank, left);
    for (int64_t c = 0; c < args.d_in; c += kStagedColumns) {
      const int64_t n = args.d_in - c < kStagedColumns ? args.d_in - c : kStagedColumns;
      const uint64_t* keep = nullptr;
      if (adapter.dropout.threshold) {
        keep_bits_block(adapter.dropout, block.philox_row, block.rows, c / kWordColumns, words_of(n), bits,
                        kWords, FetchRows{args.da ? x + c : nullptr, args.x_stride});
        keep = bits;
      }
      if (args.da) {
        stage_pairs(x + c, args.x_stride, block.rows, n, keep, kWords, pairs);
        amx_add_outer(left, rank, block.rows, pairs, n, args.da + amx_sums_size(rank, c), i > 0);
      }
      if (args.dx) {
        amx_expand(ds, block.rows, rank,
                   static_cast<const char*>(adapter.a) + c / kTileColumns * ds_steps * 2 * kTileBytes, n,
                   keep, kWords, static_cast<BF16*>(args.dx) + block.begin * args.dx_stride + c,
                   args.dx_stride, scratch);
      }
    }
  }
}

}  // namespace mlora::cpu::MLORA_ISA
