// dF [r, d] = s^T rows of one split, block of columns and panel of ranks, for each layer. With kDx the rows
// are dropped from, and dx = sum over layers of drop'(s F) is made of the same rows and columns, under the
// same masks: rows are read once, dx is written once.
//
// Letters: F [r, d] one adapter's factor, r its rank, R the largest rank.
#pragma once

#include "cuda/delta.cuh"
#include "cuda/dispatch.cuh"
#include "cuda/dropout_tile.cuh"
#include "cuda/factor_tile.cuh"
#include "cuda/tickets.cuh"

namespace mlora::cuda {

template <typename T, int kRanks, int kLayers, bool kDx>
struct GradientShape {
  // Wide panels leave shared memory for two stages only, on devices of 99 KiB.
  static constexpr bool kWide = kLayers * kRanks * static_cast<int>(sizeof(T)) >= 256;
  // Tiles under way while one is computed. Unless wide, their stages were read two tiles ago, so copies start
  // without a barrier.
  static constexpr int kAhead = kWide ? 1 : kRanks <= 32 && kLayers == 1 && sizeof(T) == 2 ? 3 : 2;
  static constexpr int kStages = kWide ? 2 : kAhead + 2;
  static constexpr int kWarpsM = kRanks >= 128 ? 4 : kRanks >= 32 ? 2 : 1;
  static constexpr int kWarpsN = kThreads / 32 / kWarpsM;
  static constexpr int kM = kRanks / 16 / kWarpsM;
  static constexpr int kN = kBlockColumns / 8 / kWarpsN;
  static constexpr int kWordsOfRow = kBlockColumns / kWordColumns;
  // One layer's part of a stage: the rows, as it drops from them; s; keep words.
  static constexpr int kRowBytes = SharedTile<T, kBlockColumns>::bytes(kTileRows);
  static constexpr int kSBytes = SharedTile<T, kRanks>::bytes(kTileRows);
  static constexpr int kKeepBytes = kDx ? kTileRows * kWordsOfRow * 4 : 0;
  static constexpr int kLayerBytes = kRowBytes + kSBytes + kKeepBytes;
  static constexpr int kStageBytes = kLayers * kLayerBytes;
  static constexpr int kTileBytes = kSplitTiles * static_cast<int>(sizeof(Tile));
  static constexpr int kFactorBytes = kDx ? SharedTile<T, kBlockColumns>::bytes(kRanks) : 0;
  static constexpr int kTurn = kTileBytes + kLayers * kFactorBytes + kStages * kStageBytes;
  static constexpr int kShared = kTurn + (kDx && sizeof(T) == 2 ? kTurnBytes : 0);
  static_assert(kLayers > 1 || (sizeof(T) == 4 && kRanks == 32) || kShared <= 99 * 1024);
};

// Writes one number of a gradient, or adds it to what is there.
template <typename T>
__device__ inline void write_number(T* place, float value, bool add) {
  T rounded;
  from_float(add ? to_float(read(place)) + value : value, rounded);
  write(place, rounded);
}

// f(place, rank, column) for each number of a panel's block of columns, where place counts in a row-major
// [R, d] from the panel's first.
template <typename Function>
__device__ inline void for_each_number(const GradientArguments& arguments, int ranks, int columns,
                                       Function&& f) {
  for (int index = thread_index(); index < ranks * kBlockColumns; index += kThreads) {
    const int rank = index / kBlockColumns;
    const int column = index % kBlockColumns;
    if (column < columns) {
      f(int64_t{rank} * arguments.columns + column, rank, column);
    }
  }
}

// Where one program's gradient goes: to the adapter's own, or, if the adapter has several splits, to partial
// sums, which the last program of them adds up.
template <typename T>
struct GradientOut {
  const GradientArguments& arguments;
  Split split;
  int layer;
  int first_rank;
  int first_column;

  __device__ void write_final(int rank, int column, float value) const {
    const FactorRow& factor = row_of(arguments.factor, layer, split.adapter);
    const int64_t place = factor.grad_offset + (first_rank + rank) * factor.grad_rank_stride +
                          (first_column + column) * factor.grad_column_stride;
    if (sizeof(T) != 4 && arguments.factor.type == Scalar::kFloat) {
      write_number(static_cast<float*>(arguments.gradient) + place, value, arguments.add);
    } else {
      write_number(static_cast<T*>(arguments.gradient) + place, value, arguments.add);
    }
  }

  __device__ float* partial(int slot) const {
    const int64_t row = (int64_t{layer} * arguments.slots + slot) * arguments.ranks + first_rank;
    return arguments.partial.sums + row * arguments.columns + first_column;
  }

  __device__ void write_sum(int rank, int column, float value) const {
    if (split.slot < 0) {
      write_final(rank, column, value);
    } else {
      write(partial(split.slot) + int64_t{rank} * arguments.columns + column, value);
    }
  }

  // After all sums of this program are written.
  __device__ void finish(int ranks, int columns, int panel) const {
    if (split.slot < 0) {
      return;
    }
    const Group group = read(arguments.plan.groups + split.adapter);
    const int blocks = ceil_div(arguments.columns, kBlockColumns);
    const int ticket =
        ((panel * arguments.layers + layer) * arguments.factor.adapters + split.adapter) * blocks +
        first_column / kBlockColumns;
    if (is_last(arguments.partial.tickets + ticket, group.slot_count)) {
      for_each_number(arguments, ranks, columns, [&](int64_t place, int rank, int column) {
        float value = 0.0f;
        for (int slot = group.slot_begin; slot < group.slot_begin + group.slot_count; ++slot) {
          value += load_shared_sum(partial(slot) + place);
        }
        write_final(rank, column, value);
      });
    }
  }
};

// One number as dx of all rows of a split.
template <bool kAligned, typename T>
__device__ inline void fill_dx(const GradientArguments& arguments, const Split& split, int first_column,
                               int columns, float value, unsigned char* turn) {
  for (int i = split.tile_begin; i < split.tile_end; ++i) {
    const Tile tile = read(arguments.plan.tiles + i);
    T* out = row_at(static_cast<T*>(arguments.dx.data), arguments.dx.stride, tile.row) + first_column;
    Delta all;
    all.fill(value);
    store_delta<kAligned>(all, out, arguments.dx.stride, tile.rows, columns, turn);
  }
}

// Whether there is memory for the partial sums of a split's adapter. None is there for a plan of another
// layout: its gradients are NaN, and it takes no tickets.
__device__ inline bool has_slots(const GradientArguments& arguments, const Split& split) {
  if (split.slot < 0) {
    return true;
  }
  const Group group = read(arguments.plan.groups + split.adapter);
  return group.slot_begin + group.slot_count <= arguments.slots;
}

// kLayers layers from `first_layer` on; those before, and panels before, have written dx already. kRanks hold
// the adapter's own ranks of the panel, which begins at `first_rank`.
template <typename T, int kRanks, int kLayers, bool kDx, Masks kMasks, bool kAligned>
__device__ inline void gradient_program(const GradientArguments& arguments, const Split& split,
                                        int first_layer, int block, int panel_index, int first_rank) {
  using Shape = GradientShape<T, kRanks, kLayers, kDx>;
  using Block = SharedTile<T, kBlockColumns>;
  using Keep = KeepBits<T, kTileRows, kBlockColumns>;
  const int first_column = block * kBlockColumns;
  const int columns = clamp(arguments.columns - first_column, kBlockColumns);
  const bool need_dx = kDx && arguments.dx.data != nullptr;
  const bool need_rows = !kDx || arguments.gradient != nullptr;
  const bool add_dx = arguments.add_dx || first_layer > 0 || panel_index > 0;
  if (split.adapter < 0) {
    if (need_dx && !add_dx) {
      fill_dx<kAligned, T>(arguments, split, first_column, columns, 0.0f, shared_memory());
    }
    return;
  }
  const auto panel_of = [&](int layer) {
    return Panel<T>(arguments.factor, row_of(arguments.factor, first_layer + layer, split.adapter),
                    first_rank, kRanks);
  };
  int ranks[kLayers];
  bool any = false;
#pragma unroll
  for (int layer = 0; layer < kLayers; ++layer) {
    ranks[layer] = panel_of(layer).ranks;
    any = any || ranks[layer] > 0;
  }
  if (!any) {
    return;
  }
  if (need_rows && !has_slots(arguments, split)) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const GradientOut<T> out{arguments, split, first_layer + layer, first_rank, first_column};
      for_each_number(arguments, ranks[layer], columns,
                      [&](int64_t, int rank, int column) { out.write_final(rank, column, NAN); });
    }
    if (need_dx) {
      fill_dx<kAligned, T>(arguments, split, first_column, columns, NAN, shared_memory());
    }
    return;
  }
  const int tile_count = split.tile_end - split.tile_begin;
  // of every layer, but for the layer's index
  const Dropout dropout =
      kMasks == Masks::kNone ? Dropout{} : dropout_of(arguments.dropout, first_layer, split.adapter);
  constexpr bool kDrops = kMasks != Masks::kNone;
  unsigned char* shared = shared_memory();
  Tile* tiles = reinterpret_cast<Tile*>(shared);
  const auto factor_of = [&](int layer) {
    return Block{reinterpret_cast<T*>(shared + Shape::kTileBytes + layer * Shape::kFactorBytes)};
  };
  const auto part_of = [&](int i, int layer) {
    return shared + Shape::kTileBytes + kLayers * Shape::kFactorBytes +
           i % Shape::kStages * Shape::kStageBytes + layer * Shape::kLayerBytes;
  };
  const auto rows_of = [&](int i, int layer) { return Block{reinterpret_cast<T*>(part_of(i, layer))}; };
  const auto s_of = [&](int i, int layer) {
    return SharedTile<T, kRanks>{reinterpret_cast<T*>(part_of(i, layer) + Shape::kRowBytes)};
  };
  const auto words_of = [&](int i, int layer) {
    return reinterpret_cast<uint32_t*>(part_of(i, layer) + Shape::kRowBytes + Shape::kSBytes);
  };
  // The rows come into layer 0's place.
  const auto fetch = [&](int i) {
    if (i < tile_count) {
      const Tile tile = tiles[i];
      if (need_rows) {
        const T* rows = static_cast<const T*>(arguments.rows.data);
        load_rows<kTileRows, kAligned>(rows_of(i, 0),
                                       row_at(rows, arguments.rows.stride, tile.row) + first_column,
                                       arguments.rows.stride, tile.rows, columns);
      }
#pragma unroll
      for (int layer = 0; layer < kLayers; ++layer) {
        const T* s = static_cast<const T*>(arguments.s.data) + (first_layer + layer) * arguments.layer_stride;
        load_rows<kTileRows, kAligned>(s_of(i, layer), row_at(s, arguments.s.stride, tile.row) + first_rank,
                                       arguments.s.stride, tile.rows, ranks[layer], kTileRows,
                                       whole_blocks(ranks[layer]));
      }
    }
    commit_copies();
  };
  // Stored keep bits of the thread's own chunks wait in registers until the rows are there.
  uint32_t waiting[kLayers][Keep::kOwn];
  const auto fetch_keep = [&](int i) {
    const int column = first_column + Keep::word() * kWordColumns;
#pragma unroll
    for (int layer = 0; layer < kLayers; ++layer) {
#pragma unroll
      for (int k = 0; k < Keep::kOwn; ++k) {
        const int row = Keep::Own::row(k);
        waiting[layer][k] = 0;
        if (dropout.threshold == 0) {
          waiting[layer][k] = ~0u;
        } else if (i < tile_count && row < tiles[i].rows && column < arguments.columns) {
          waiting[layer][k] =
              read(arguments.keep + word_place(arguments.rows_total, arguments.columns, first_layer + layer,
                                               tiles[i].row + row, column));
        }
      }
    }
  };
  // Keep bits of tile i, for each layer: needs no rows, so it runs while they are copied.
  const auto draw_rows = [&](int i, Keep(&keeps)[kLayers]) {
#pragma unroll
    for (int layer = kLayers - 1; layer >= 0; --layer) {
      if constexpr (kMasks == Masks::kStored) {
        keeps[layer].set(waiting[layer]);
      } else {
        Dropout own = dropout;
        own.layer = layer_index(arguments.dropout, first_layer + layer);
        keeps[layer].draw(own, tiles[i].philox_row, first_column);
      }
      if (need_dx) {
#pragma unroll
        for (int k = 0; k < Keep::kOwn; ++k) {
          words_of(i, layer)[Keep::Own::row(k) * Shape::kWordsOfRow + Keep::word()] =
              kMasks == Masks::kStored ? waiting[layer][k] : keeps[layer].whole_word(k);
        }
      }
    }
  };
  // Clears what is dropped of the rows of tile i, for each layer.
  const auto drop_rows = [&](int i,
                             const Keep(&keeps)[kLayers]) {  // layer 0's rows are dropped from in place: last
#pragma unroll
    for (int layer = kLayers - 1; layer >= 0; --layer) {
      if (need_rows) {
        keeps[layer].apply(rows_of(i, 0), rows_of(i, layer));
      }
    }
  };

  if (thread_index() < tile_count) {
    tiles[thread_index()] = read(arguments.plan.tiles + split.tile_begin + thread_index());
  }
  if (need_dx) {
#pragma unroll
    for (int layer = 0; layer < kLayers; ++layer) {
      FactorLoad<T, kRanks, kBlockColumns, false, kAligned>().begin(factor_of(layer), panel_of(layer),
                                                                    first_column, columns);
    }
  }
  synchronize();
#pragma unroll
  for (int i = 0; i < Shape::kAhead; ++i) {
    fetch(i);
  }
  if (kMasks == Masks::kStored) {
    fetch_keep(0);
  }
  Fragment<Shape::kM, Shape::kN> sum[kLayers];
#pragma unroll
  for (int layer = 0; layer < kLayers; ++layer) {
    sum[layer].clear();
  }
  const int m = warp_index() % Shape::kWarpsM * 16 * Shape::kM;
  const int n = warp_index() / Shape::kWarpsM * 8 * Shape::kN;
#pragma unroll 1
  for (int i = 0; i < tile_count; ++i) {
    if constexpr (!Shape::kWide) {
      fetch(i + Shape::kAhead);
    }
    Keep keeps[kLayers];
    if constexpr (kDrops) {
      draw_rows(i, keeps);
    }
    wait_copies<Shape::kWide ? 0 : Shape::kAhead>();
    if constexpr (kDrops) {
      drop_rows(i, keeps);
      if (kMasks == Masks::kStored) {
        fetch_keep(i + 1);
      }
    }
    synchronize();
    if constexpr (Shape::kWide) {
      fetch(i + Shape::kAhead);
    }
    Delta dx;
    dx.clear();
#pragma unroll
    for (int layer = 0; layer < kLayers; ++layer) {
      if (need_rows) {
        add_product<Ranks::kRows, false, false, kTileRows>(
            sum[layer], s_of(i, layer), m, rows_of(i, kDrops ? layer : 0), n, 0, ranks[layer]);
      }
      if (need_dx && kDrops) {
        uint32_t keep[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          keep[half] = words_of(i, layer)[(delta_row() + fragment_row() + 8 * half) * Shape::kWordsOfRow +
                                          delta_column() / kWordColumns];
        }
        Delta part;
        part.clear();
        add_delta(part, s_of(i, layer), factor_of(layer), ranks[layer]);
        add_kept(dx, part, keep, layer == 0);
      } else if (need_dx) {
        add_delta(dx, s_of(i, layer), factor_of(layer), ranks[layer]);
      }
    }
    if (need_dx) {
      T* out = row_at(static_cast<T*>(arguments.dx.data), arguments.dx.stride, tiles[i].row) + first_column;
      if (add_dx) {
        add_existing(dx, out, arguments.dx.stride, tiles[i].rows, columns);
      }
      store_delta<kAligned>(dx, out, arguments.dx.stride, tiles[i].rows, columns, shared + Shape::kTurn);
    }
  }
#pragma unroll
  for (int layer = 0; layer < kLayers; ++layer) {
    const GradientOut<T> out{arguments, split, first_layer + layer, first_rank, first_column};
    if (need_rows) {
      sum[layer].for_each([&](int rank, int column, float value) {
        if (m + rank < ranks[layer] && n + column < columns) {
          out.write_sum(m + rank, n + column, value);
        }
      });
      out.finish(ranks[layer], columns, panel_index);
    }
  }
}

// Of the panel's programs: those of narrower panels have other shapes.
template <typename T, int kRanks, int kLayers, bool kDx>
constexpr int kGradientShared =
    larger(GradientShape<T, kRanks, kLayers, kDx>::kShared,
           kNarrows<T, kRanks> ? kGradientShared<T, larger(kRanks / 2, 16), kLayers, kDx> : 0);
template <typename T, int kLayers, bool kDx>
constexpr int kGradientShared<T, 16, kLayers, kDx> = GradientShape<T, 16, kLayers, kDx>::kShared;

// One program of a launch whose panels hold kRanks; it takes the width of its adapter's own.
template <typename T, int kRanks, int kLayers, bool kDx, Masks kMasks, bool kAligned>
__device__ inline void gradient_split(const GradientArguments& arguments, int split_index, int first_layer,
                                      int block, int panel) {
  const Split split = read(arguments.plan.splits + split_index);
  const int first_rank = panel * kRanks;
  int ranks = 0;
  for (int layer = first_layer; split.adapter >= 0 && layer < first_layer + kLayers; ++layer) {
    const int own = panel_ranks(row_of(arguments.factor, layer, split.adapter).rank, first_rank, kRanks);
    ranks = own > ranks ? own : ranks;
  }
  for_own_width<T, kAligned, kRanks>(ranks, [&](auto width) {
    gradient_program<T, decltype(width)::value, kLayers, kDx, kMasks, kAligned>(arguments, split, first_layer,
                                                                                block, panel, first_rank);
  });
}

}  // namespace mlora::cuda
