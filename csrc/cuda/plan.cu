// The plan of one batch, by one block: each adapter has a thread, which walks the segments for its own; one
// more thread serves the rows without an adapter. And the parts of the frozen product's row tiles, a thread
// each.
#include "cuda/kernels.h"
#include "cuda/primitives.cuh"

namespace mlora::cuda {
namespace {

constexpr int kPlanThreads = 512;

// Writes the tiles of rows [begin, end) from number `first`; returns how many they are.
__device__ inline int32_t write_tiles(const PlanTables& tables, int32_t first, int64_t begin, int64_t end,
                                      int32_t adapter, int64_t row0) {
  const int32_t count = ceil_div(end - begin, kTileRows);
  for (int32_t i = 0; i < count && first + i < tables.tile_count; ++i) {
    tables.tiles[first + i] = tile_of(begin, end, i, adapter, row0);
  }
  return count;
}

// f(segment) for each segment that an adapter serves, in order.
template <typename Function>
__device__ inline void for_each_served(const Batch& batch, Function&& f) {
  for (int32_t i = 0; i < batch.segment_count; ++i) {
    const Segment segment = batch.segments[i];
    if (is_served(batch, segment)) {
      f(segment);
    }
  }
}

__device__ inline void write_splits(const PlanTables& tables, int32_t first, Range tiles, int32_t runs,
                                    int32_t adapter, int32_t slot) {
  for (int32_t run = 0; run < runs && first + run < tables.split_count; ++run) {
    tables.splits[first + run] = split_of(tiles, run, adapter, slot < 0 ? -1 : slot + run);
  }
}

// Number N stands for the tiles without an adapter, and the unused entries behind them.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(Batch batch, PlanTables tables) {
  for (int32_t i = thread_index(); i < batch.adapters; i += kPlanThreads) {
    int32_t count = 0;
    for_each_served(batch, [&](const Segment& segment) {
      count += segment.adapter == i ? ceil_div(segment.end - segment.begin, kTileRows) : 0;
    });
    tables.groups[i].tile_end = count;
  }
  synchronize();
  for (int32_t i = thread_index(); i <= batch.adapters; i += kPlanThreads) {
    Range tiles = {0, 0};
    int32_t split = 0;
    int32_t slot = 0;
    for (int32_t k = 0; k < i; ++k) {
      const int32_t count = tables.groups[k].tile_end;
      tiles.begin += count;
      split += runs_of(count);
      slot += slots_of(count);
    }
    int32_t runs = 0;
    if (i < batch.adapters) {
      for_each_served(batch, [&](const Segment& segment) {
        if (segment.adapter == i) {
          tiles.count +=
              write_tiles(tables, tiles.begin + tiles.count, segment.begin, segment.end, i, segment.row0);
        }
      });
      runs = runs_of(tiles.count);
      tables.groups[i].tile_begin = tiles.begin;
      tables.groups[i].slot_begin = slot;
      tables.groups[i].slot_count = slots_of(tiles.count);
      write_splits(tables, split, tiles, runs, i, slots_of(tiles.count) > 0 ? slot : -1);
      continue;
    }
    int64_t reached = 0;
    const auto write_gap = [&](int64_t end) {
      tiles.count += write_tiles(tables, tiles.begin + tiles.count, reached, end, -1, 0);
    };
    for_each_served(batch, [&](const Segment& segment) {
      write_gap(segment.begin);
      reached = segment.end > reached ? segment.end : reached;
    });
    write_gap(batch.rows);
    runs = ceil_div(tiles.count, kSplitTiles);
    write_splits(tables, split, tiles, runs, -1, -1);
    for (int32_t k = tiles.begin + tiles.count; k < tables.tile_count; ++k) {
      tables.tiles[k] = {0, 0, -1, 0};
    }
    for (int32_t k = split + runs; k < tables.split_count; ++k) {
      tables.splits[k] = {0, 0, -1, -1};
    }
  }
  synchronize();
  for (int32_t i = thread_index(); i < batch.adapters; i += kPlanThreads) {
    tables.groups[i].tile_end += tables.groups[i].tile_begin;
  }
}

constexpr int kPartThreads = 64;

// The parts of one row tile a thread; one more thread writes the last entry of `starts`.
__global__ void __launch_bounds__(kPartThreads) parts_kernel(PartTables tables, Batch batch) {
  const int32_t own = block_x() * kPartThreads + thread_index();
  if (own > ceil_div(batch.rows, kProductRows)) {
    return;
  }
  int32_t place = 0;
  for_each_served(batch, [&](const Segment& segment) {
    const Range reached = product_tiles(batch, segment);
    const int32_t before = own - reached.begin;
    place += before < 0 ? 0 : before < reached.count ? before : reached.count;
  });
  tables.starts[own] = place < tables.room ? place : tables.room;
  const int64_t row = int64_t{own} * kProductRows;
  for_each_served(batch, [&](const Segment& segment) {
    const int64_t begin = segment.begin > row ? segment.begin : row;
    const int64_t tile_end = row + kProductRows < batch.rows ? row + kProductRows : batch.rows;
    const int64_t end = segment.end < tile_end ? segment.end : tile_end;
    if (begin < end && place < tables.room) {
      tables.parts[place++] = {static_cast<int32_t>(begin), static_cast<int32_t>(end - begin),
                               static_cast<int32_t>(segment.adapter),
                               static_cast<uint32_t>(segment.row0 + begin - segment.begin)};
    }
  });
}

}  // namespace

int launch_parts(const Batch& batch, const PartTables& tables, const Queue& queue) {
  const Grid grid = {ceil_div(ceil_div(batch.rows, kProductRows) + 1, kPartThreads)};
  return launch(parts_kernel, grid, kPartThreads, 0, queue, tables, batch);
}

int launch_plan(const Batch& batch, const PlanTables& tables, const Queue& queue) {
  return launch(plan_kernel, Grid{1}, kPlanThreads, 0, queue, batch, tables);
}

}  // namespace mlora::cuda
