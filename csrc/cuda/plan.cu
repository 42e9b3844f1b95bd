// The plan of one batch, by one block.
#include "cuda/kernels.h"
#include "cuda/primitives.cuh"

namespace mlora::cuda {
namespace {

constexpr int kPlanThreads = 512;

__device__ inline void write_tiles(const PlanTables& tables, int32_t first, int64_t begin, int64_t end,
                                   int32_t adapter, int64_t row0) {
  const int32_t count = ceil_div(end - begin, kTileRows);
  for (int32_t i = 0; i < count && first + i < tables.tile_count; ++i) {
    tables.tiles[first + i] = tile_of(begin, end, i, adapter, row0);
    if (adapter < 0) {
      tables.tiles[first + i].philox_row = 0;
    }
  }
}

__device__ inline void write_splits(const PlanTables& tables, int32_t first, Range tiles, int32_t runs,
                                    int32_t adapter, int32_t slot) {
  for (int32_t run = 0; run < runs && first + run < tables.split_count; ++run) {
    tables.splits[first + run] = split_of(tiles, run, adapter, slot < 0 ? -1 : slot + run);
  }
}

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(Batch batch, PlanTables tables) {
  const int32_t thread = thread_index();
  const Place end = place_of(batch, batch.segment_count);
  const int32_t used = end.tile + end.gap_tile + ceil_div(batch.rows - end.gap_begin, kTileRows);
  for (int32_t i = thread; i <= batch.segment_count; i += kPlanThreads) {
    const bool last = i == batch.segment_count;
    if (last || is_served(batch, batch.segments[i])) {
      const Place place = place_of(batch, i);
      const int64_t gap_end = last ? batch.rows : batch.segments[i].begin;
      write_tiles(tables, end.tile + place.gap_tile, place.gap_begin, gap_end, -1, 0);
      if (!last) {
        const Segment segment = batch.segments[i];
        write_tiles(tables, place.tile, segment.begin, segment.end, static_cast<int32_t>(segment.adapter),
                    segment.row0);
      }
    }
  }
  for (int32_t i = used + thread; i < tables.tile_count; i += kPlanThreads) {
    tables.tiles[i] = {0, 0, -1, 0};
  }
  for (int32_t i = thread; i < batch.adapters; i += kPlanThreads) {
    const Range tiles = adapter_tiles(batch, i);
    tables.groups[i].tile_begin = tiles.begin;
    tables.groups[i].tile_end = tiles.begin + tiles.count;
  }
  synchronize();
  // number N stands for the tiles without adapter, and the unused entries after them
  for (int32_t i = thread; i <= batch.adapters; i += kPlanThreads) {
    int32_t run = 0;
    int32_t slot = 0;
    for (int32_t k = 0; k < i; ++k) {
      const int32_t tiles = tables.groups[k].tile_end - tables.groups[k].tile_begin;
      run += runs_of(tiles);
      slot += slots_of(tiles);
    }
    if (i < batch.adapters) {
      Group& group = tables.groups[i];
      const Range tiles = {group.tile_begin, group.tile_end - group.tile_begin};
      group.slot_count = slots_of(tiles.count);
      group.slot_begin = slot;
      write_splits(tables, run, tiles, runs_of(tiles.count), i, group.slot_count > 0 ? slot : -1);
    } else {
      const Range tiles = {end.tile, used - end.tile};
      const int32_t runs = ceil_div(tiles.count, kSplitTiles);
      write_splits(tables, run, tiles, runs, -1, -1);
      for (int32_t k = run + runs; k < tables.split_count; ++k) {
        tables.splits[k] = {0, 0, -1, -1};
      }
    }
  }
}

}  // namespace

int launch_plan(const Batch& batch, const PlanTables& tables, const Queue& queue) {
  return launch(plan_kernel, Grid{1}, kPlanThreads, 0, queue.stream, queue.device, batch, tables);
}

}  // namespace mlora::cuda
