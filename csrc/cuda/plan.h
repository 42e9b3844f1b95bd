// Which program serves which rows, as docs/gpu.md lays it down.
//
// Letters: T rows, N adapters, S segments, K tiles, M splits.
#pragma once

#include <cstdint>

#include "cuda/host_device.h"

namespace mlora::cuda {

constexpr int kTileRows = 64;
constexpr int kSplitTiles = 16;
constexpr int kColumnSplit = 2048;

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

// Where the tiles of a segment and of the gap before it lie.
struct Place {
  int32_t tile = 0;      // tiles of adapters before this segment's
  int32_t gap_tile = 0;  // tiles of earlier gaps
  int64_t gap_begin = 0;
};

MLORA_HD int32_t ceil_div(int64_t value, int32_t unit) {
  return value <= 0 ? 0 : static_cast<int32_t>((value + unit - 1) / unit);
}

MLORA_HD bool is_served(const Batch& batch, const Segment& segment) {
  return segment.adapter >= 0 && segment.adapter < batch.adapters && segment.begin < segment.end;
}

MLORA_HD int32_t tiles_of(const Segment& segment) { return ceil_div(segment.end - segment.begin, kTileRows); }

// `index` may be one past the last segment: the end of all adapters' tiles, and the last gap.
MLORA_HD Place place_of(const Batch& batch, int32_t index) {
  Place place;
  const int64_t adapter =
      index < batch.segment_count ? batch.segments[index].adapter : int64_t{batch.adapters};
  for (int32_t i = 0; i < batch.segment_count; ++i) {
    const Segment segment = batch.segments[i];
    if (!is_served(batch, segment)) {
      continue;
    }
    const int32_t tiles = tiles_of(segment);
    place.tile += segment.adapter < adapter || (segment.adapter == adapter && i < index) ? tiles : 0;
    if (i < index) {
      place.gap_tile += ceil_div(segment.begin - place.gap_begin, kTileRows);
      place.gap_begin = segment.end > place.gap_begin ? segment.end : place.gap_begin;
    }
  }
  return place;
}

// The number-th tile of rows [begin, end).
MLORA_HD Tile tile_of(int64_t begin, int64_t end, int32_t number, int32_t adapter, int64_t row0) {
  const int64_t row = begin + int64_t{number} * kTileRows;
  const int64_t rows = end - row < kTileRows ? end - row : kTileRows;
  return {static_cast<int32_t>(row), static_cast<int32_t>(rows), adapter,
          static_cast<uint32_t>(row0 + row - begin)};
}

MLORA_HD Range adapter_tiles(const Batch& batch, int32_t adapter) {
  Range range = {0, 0};
  for (int32_t i = 0; i < batch.segment_count; ++i) {
    const Segment segment = batch.segments[i];
    if (is_served(batch, segment)) {
      range.begin += segment.adapter < adapter ? tiles_of(segment) : 0;
      range.count += segment.adapter == adapter ? tiles_of(segment) : 0;
    }
  }
  return range;
}

// Runs of an adapter's tiles: at least one, which writes the zeros of an adapter without rows.
MLORA_HD int32_t runs_of(int32_t tiles) { return tiles == 0 ? 1 : ceil_div(tiles, kSplitTiles); }

MLORA_HD int32_t slots_of(int32_t tiles) { return runs_of(tiles) > 1 ? runs_of(tiles) : 0; }

MLORA_HD Split split_of(Range tiles, int32_t run, int32_t adapter, int32_t slot) {
  const int32_t begin = tiles.begin + run * kSplitTiles;
  const int32_t end = tiles.begin + tiles.count;
  return {begin, end < begin + kSplitTiles ? end : begin + kSplitTiles, adapter, slot};
}

// A launch that reads the rows of each split twice: its programs are, split by split, those of tiles and then
// those of column blocks, so that both meet the rows at about the same time.
struct SplitPrograms {
  int32_t column_splits;  // 0: no programs of tiles
  int32_t column_blocks;  // 0: no programs of column blocks
  int32_t panels;
};

struct SplitProgram {
  int32_t split;
  bool of_tile;
  int32_t tile;    // within the split
  int32_t column;  // column split or column block
  int32_t panel;
};

MLORA_HD int32_t programs_per_split(const SplitPrograms& programs) {
  return (kSplitTiles * programs.column_splits + programs.column_blocks) * programs.panels;
}

MLORA_HD SplitProgram program_of(const SplitPrograms& programs, int32_t index) {
  SplitProgram program;
  program.split = index / programs_per_split(programs);
  index %= programs_per_split(programs);
  program.panel = index % programs.panels;
  index /= programs.panels;
  program.of_tile = index < kSplitTiles * programs.column_splits;
  program.tile = program.of_tile ? index / programs.column_splits : 0;
  program.column =
      program.of_tile ? index % programs.column_splits : index - kSplitTiles * programs.column_splits;
  return program;
}

}  // namespace mlora::cuda
