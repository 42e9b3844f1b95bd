// Which program serves which rows, as docs/dev/gpu.md lays it down.
//
// Letters: T rows, N adapters, S segments, K tiles, M splits.
#pragma once

#include <cstdint>

#include "cuda/host_device.h"

namespace mlora::cuda {

constexpr int kTileRows = 64;
constexpr int kSplitTiles = 16;
constexpr int kQuarters = 4;
constexpr int kProductRows = 128;  // of a row tile of the frozen product

struct Segment {
  int64_t begin;
  int64_t end;
  int64_t adapter;
  int64_t row0;
};

struct alignas(16) Tile {
  int32_t row;
  int32_t rows;
  int32_t adapter;
  uint32_t philox_row;
};

struct alignas(16) Split {
  int32_t tile_begin;
  int32_t tile_end;
  int32_t adapter;
  int32_t slot;
};

struct alignas(16) Group {
  int32_t tile_begin;
  int32_t tile_end;
  int32_t slot_begin;
  int32_t slot_count;
};

// What the frozen product's row tiles hold of segments with an adapter, in the order of rows: row tile t has
// parts [starts[t], starts[t + 1]). A part lies in one row tile and one segment.
struct PartView {
  const int32_t* starts;  // [T / 128, rounded up, + 1]
  const Tile* parts;
};

// The segments of a batch; those of no adapter, or of one that is not there, count as absent.
struct Batch {
  const Segment* segments;
  int32_t segment_count;
  int32_t adapters;
  int64_t rows;
};

struct Range {
  int32_t begin;
  int32_t count;
};

MLORA_HD int32_t ceil_div(int64_t value, int32_t unit) {
  return value <= 0 ? 0 : static_cast<int32_t>((value + unit - 1) / unit);
}

// A sum over columns joins the sums of at most four runs of so many columns, in their order. One program
// makes them all, or one each: the bits are the same.
MLORA_HD int quarter_of(int columns) {
  constexpr int kUnit = 128;
  return ceil_div(columns, kQuarters * kUnit) * kUnit;
}

MLORA_HD bool is_served(const Batch& batch, const Segment& segment) {
  return segment.adapter >= 0 && segment.adapter < batch.adapters && segment.begin < segment.end;
}

// The number-th tile of rows [begin, end); rows without an adapter draw no masks.
MLORA_HD Tile tile_of(int64_t begin, int64_t end, int32_t number, int32_t adapter, int64_t row0) {
  const int64_t row = begin + int64_t{number} * kTileRows;
  const int64_t rows = end - row < kTileRows ? end - row : kTileRows;
  const uint32_t philox_row = adapter < 0 ? 0 : static_cast<uint32_t>(row0 + row - begin);
  return {static_cast<int32_t>(row), static_cast<int32_t>(rows), adapter, philox_row};
}

// Row tiles of the frozen product that a segment reaches, cut off at the batch's last row.
MLORA_HD Range product_tiles(const Batch& batch, const Segment& segment) {
  const int64_t end = segment.end < batch.rows ? segment.end : batch.rows;
  const int32_t first = static_cast<int32_t>(segment.begin / kProductRows);
  return {first, ceil_div(end, kProductRows) - first};
}

// At most so many parts.
MLORA_HD int64_t most_parts(int64_t rows, int64_t segments) {
  return ceil_div(rows, kProductRows) + segments;
}

// Rows of a table [*, 4] that hold `starts`.
inline int64_t start_rows(int64_t rows) { return ceil_div(ceil_div(rows, kProductRows) + 1, 4); }

// Runs of an adapter's tiles: at least one, which writes the zeros of an adapter without rows.
MLORA_HD int32_t runs_of(int32_t tiles) { return tiles == 0 ? 1 : ceil_div(tiles, kSplitTiles); }

MLORA_HD int32_t slots_of(int32_t tiles) { return runs_of(tiles) > 1 ? runs_of(tiles) : 0; }

MLORA_HD Split split_of(Range tiles, int32_t run, int32_t adapter, int32_t slot) {
  const int32_t begin = tiles.begin + run * kSplitTiles;
  const int32_t end = tiles.begin + tiles.count;
  return {begin, end < begin + kSplitTiles ? end : begin + kSplitTiles, adapter, slot};
}

}  // namespace mlora::cuda
