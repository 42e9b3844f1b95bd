// One block of the frozen product with the low-rank part inside:
//
//   y = x W^T + s B_a^T + bias      (forward)        dx = dy W + keep(ds A_a)      (backward)
//
// a is the adapter of a row; sums are fp32 and rounded once. The oracle is tests/cuda/test_hopper_product.py,
// in fp64.
//
// A tile is 128 x 256 numbers, made 64 deep from four stages of shared memory. One thread loads the stages,
// two warpgroups of 64 rows multiply. Row tiles are cut without regard to segments. So the low-rank part
// comes last, for each *part* of the tile (the rows of one segment in it), 64 ranks a stage and 32 columns a
// product, and is added to the part's rows only. So a row's bits depend on that row, its adapter and W alone.
//
// A cluster of two blocks has neighbouring row tiles, and each loads one half of W's stage for both. They
// turn through the same stages in step; where one has fewer parts its stages are empty.
#pragma once

#include "cuda/dropout_tile.cuh"
#include "cuda/hopper.cuh"
#include "cuda/hopper_product.h"

namespace mlora::cuda {

struct ProductMaps {
  TensorMap rows, weight, s, factor, out;
};

// What the blocks read beside the matrices.
struct ProductTables {
  PartView parts;
  const FactorRow* factors;
  int pitch;  // of the page of factors
  const void* bias;
  const uint32_t* keep;
  DropoutTables dropout;
  int rows;
  int columns;  // of the result
  int depth;
  int group;
  bool add;
};

struct ProductShape {
  static constexpr int kRows = kProductRows;
  static constexpr int kColumns = 256;
  static constexpr int kDepth = 64;
  static constexpr int kStages = 4;
  static constexpr int kThreads = 384;
  static constexpr int kRowsBytes = kRows * kDepth * 2;
  static constexpr int kStageBytes = kRowsBytes + kColumns * kDepth * 2;
  static constexpr int kBoxBytes = kDepth * 128;       // of 64 rows or columns of W
  static constexpr int kFactorBoxBytes = kDepth * 64;  // of 32 columns
  static constexpr int kWarpRows = 16;
  static constexpr int kTurnBoxBytes = kWarpRows * 128;  // 64 columns of a warp's rows
  static constexpr int kTurnBytes = 2 * kTurnBoxBytes;   // of a warp
  static constexpr int kTurn = kStages * kStageBytes;
  static constexpr int kFull = kTurn + 8 * kTurnBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kShared = kEmpty + 8 * kStages;
};

#if defined(MLORA_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Descriptor of an operand in shared memory, whose rows are swizzled over 128 bytes. Along: groups of eight
// rows 1 KiB apart. Across: boxes of 64 columns, 8 KiB apart, of groups of eight rows.
template <bool kAcross>
MLORA_DEVICE uint64_t operand(uint32_t address) {
  constexpr uint64_t kBox = kAcross ? ProductShape::kBoxBytes >> 4 : 1, kGroup = 1024 >> 4;
  return uint64_t{(address & 0x3ffff) >> 4} | kBox << 16 | kGroup << 32 | uint64_t{1} << 62;
}

// Of factors, across, whose rows are swizzled over 64 bytes. A product of 32 columns takes a whole box: no
// descriptor begins within a swizzled row.
MLORA_DEVICE uint64_t factor_operand(uint32_t address) {
  constexpr uint64_t kBox = ProductShape::kFactorBoxBytes >> 4, kGroup = 512 >> 4;
  return uint64_t{(address & 0x3ffff) >> 4} | kBox << 16 | kGroup << 32 | uint64_t{2} << 62;
}

// The stage whose turn it is, and the parity of its turn.
struct Turn {
  int stage = 0;
  int parity = 0;
  MLORA_DEVICE void next() {
    if (++stage == ProductShape::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A part's rows, and where its adapter's factor lies in the page. No ranks: there is no such part.
struct RankPart {
  int begin = 0;
  int end = 0;
  int first = 0;
  int ranks = 0;
  uint32_t always = 0;  // keep bits that are set whatever is stored: of an adapter that drops nothing
};

template <typename T, bool kForward, Masks kMasks, int kCluster>
class ProductBlock {
  using Shape = ProductShape;
  static constexpr bool kAcross = !kForward;

 public:
  MLORA_DEVICE ProductBlock(const ProductMaps& block_maps, const ProductTables& block_tables)
      : maps(block_maps),
        tables(block_tables),
        shared(shared_address(shared_memory())),
        row_tiles(ceil_div(block_tables.rows, Shape::kRows)),
        pairs(ceil_div(row_tiles, kCluster)),
        column_tiles(ceil_div(block_tables.columns, Shape::kColumns)),
        steps(ceil_div(block_tables.depth, Shape::kDepth)) {}

  MLORA_DEVICE void run() {
    if (thread_index() == 0) {
      for (int i = 0; i < Shape::kStages; ++i) {
        barrier_begin(full(i), 1);
        barrier_begin(empty(i), 8 * kCluster);  // the warps that multiply
      }
      barriers_have_begun();
      fetch_map(&maps.rows);
      fetch_map(&maps.weight);
      fetch_map(&maps.out);
    }
    synchronize_cluster<kCluster>();
    if (thread_index() < 128) {
      leave_registers<40>();
      if (thread_index() == 0) {
        load();
      }
    } else {
      take_registers<232>();
      multiply();
    }
    synchronize_cluster<kCluster>();  // no block leaves while the other may still write into its memory
  }

 private:
  const ProductMaps& maps;
  const ProductTables& tables;
  const uint32_t shared;
  const int row_tiles;
  const int pairs;
  const int column_tiles;
  const int steps;
  Turn turn;
  int tile = 0;    // of rows
  int pair = 0;    // of row tiles: those of the cluster
  int column = 0;  // the tile's first

  MLORA_DEVICE uint32_t full(int stage) const { return shared + Shape::kFull + 8 * stage; }
  MLORA_DEVICE uint32_t empty(int stage) const { return shared + Shape::kEmpty + 8 * stage; }
  MLORA_DEVICE uint32_t stage_bytes(int stage) const { return shared + stage * Shape::kStageBytes; }
  MLORA_DEVICE int warpgroup() const { return thread_index() / 128 - 1; }
  MLORA_DEVICE int warp_row() const {
    return tile * Shape::kRows + (thread_index() / 32 - 4) * Shape::kWarpRows;
  }
  // The warp's own memory. First keep bits or the bias stand there, then columns of the result on their way
  // out.
  MLORA_DEVICE uint32_t turn_bytes() const {
    return shared + Shape::kTurn + (thread_index() / 32 - 4) * Shape::kTurnBytes;
  }

  // f() for each tile of this cluster. A group's row tiles come one after the other under the same columns.
  template <typename Function>
  MLORA_DEVICE void for_each_tile(Function&& f) {
    const int width = tables.group * column_tiles;
    for (int number = block_x() / kCluster; number < pairs * column_tiles; number += grid_x() / kCluster) {
      const int first = number / width * tables.group;
      const int size = pairs - first < tables.group ? pairs - first : tables.group;
      pair = first + number % width % size;
      column = number % width / size * Shape::kColumns;
      tile = pair * kCluster + cluster_rank<kCluster>();
      f();
    }
  }

  MLORA_DEVICE int own_part_count() const {
    return tables.parts.starts == nullptr || tile >= row_tiles ? 0 : count_of(tile);
  }
  MLORA_DEVICE int count_of(int row_tile) const {
    return read(tables.parts.starts + row_tile + 1) - read(tables.parts.starts + row_tile);
  }
  MLORA_DEVICE RankPart part_of(int row_tile, int index) const {
    RankPart part;
    if (row_tile < row_tiles && index < count_of(row_tile)) {
      const Tile rows = read(tables.parts.parts + read(tables.parts.starts + row_tile) + index);
      const int ranks = static_cast<int>(read(&tables.factors[rows.adapter].rank));
      part = {rows.row, rows.row + rows.rows, rows.adapter * tables.pitch, ranks, 0};
      if (kMasks == Masks::kStored && dropout_threshold(read(tables.dropout.p + rows.adapter)) == 0) {
        part.always = ~0u;
      }
    }
    return part;
  }
  // f(part, stages) for as many parts, and with as many stages, as the cluster's largest has.
  template <typename Function>
  MLORA_DEVICE void for_each_part(Function&& f) const {
    int count = 0;
    for (int i = pair * kCluster; i < (pair + 1) * kCluster && tables.parts.starts != nullptr; ++i) {
      count = i < row_tiles && count_of(i) > count ? count_of(i) : count;
    }
#pragma unroll 1
    for (int index = 0; index < count; ++index) {
      RankPart own;
      int most = 0;
#pragma unroll
      for (int i = 0; i < kCluster; ++i) {
        const RankPart part = part_of(pair * kCluster + i, index);
        own = i == cluster_rank<kCluster>() ? part : own;
        most = part.ranks > most ? part.ranks : most;
      }
      f(own, ceil_div(most, Shape::kDepth));
    }
  }

  // --- one thread loads

  MLORA_DEVICE void load() {
    for_each_tile([&] {
#pragma unroll 1
      for (int k = 0; k < steps; ++k, turn.next()) {
        load_stage(k * Shape::kDepth);
      }
      for_each_part([&](const RankPart& part, int stages) {
#pragma unroll 1
        for (int i = 0; i < stages; ++i, turn.next()) {
          load_ranks(part, i * Shape::kDepth);
        }
      });
    });
  }

  MLORA_DEVICE void load_stage(int k) {
    const uint32_t to = stage_bytes(turn.stage), barrier = full(turn.stage);
    barrier_wait(empty(turn.stage), turn.parity ^ 1);
    barrier_expect(barrier, Shape::kStageBytes);
    load_box(to, &maps.rows, k, tile * Shape::kRows, barrier);
#pragma unroll
    for (int box = 0; box < Shape::kColumns / 64; ++box) {
      const int own = column + box * 64;
      const uint32_t where = to + Shape::kRowsBytes + box * Shape::kBoxBytes;
      if constexpr (kCluster == 1) {
        load_box(where, &maps.weight, kForward ? k : own, kForward ? own : k, barrier);
      } else if (box / 2 == cluster_rank<kCluster>()) {
        load_box_for_both(where, &maps.weight, kForward ? k : own, kForward ? own : k, barrier);
      }
    }
  }

  MLORA_DEVICE void load_ranks(const RankPart& part, int rank) {
    const uint32_t to = stage_bytes(turn.stage), barrier = full(turn.stage);
    barrier_wait(empty(turn.stage), turn.parity ^ 1);
    const bool wanted = part.ranks > rank;
    barrier_expect(barrier, wanted ? Shape::kStageBytes : 0);
    if (wanted) {
      load_box(to, &maps.s, rank, tile * Shape::kRows, barrier);
#pragma unroll 1
      for (int box = 0; box < Shape::kColumns / 32; ++box) {
        load_box(to + Shape::kRowsBytes + box * Shape::kFactorBoxBytes, &maps.factor, column + box * 32,
                 part.first + rank, barrier);
      }
    }
  }

  // --- two warpgroups multiply

  MLORA_DEVICE void multiply() {
    float sum[128];
    for_each_tile([&] {
      int held = -1;  // the stage that products under way read
      // Products of a stage; meanwhile() runs beside them.
      const auto multiply_stage = [&](auto add, auto&& meanwhile) {
        barrier_wait(full(turn.stage), turn.parity);
        const uint32_t from = stage_bytes(turn.stage);
        const uint64_t a = operand<false>(from + warpgroup() * 64 * 128);
        const uint64_t b = operand<kAcross>(from + Shape::kRowsBytes);
        begin_products();
#pragma unroll
        for (int k = 0; k < Shape::kDepth / 16; ++k) {
          multiply_wide<kAcross>(T{}, sum, a + 2 * k, b + (kAcross ? 128 : 2) * k,
                                 decltype(add)::value || k > 0);
        }
        commit_products();
        meanwhile();
        wait_products<1>();
        release(held);
        held = turn.stage;
        turn.next();
      };
      int next_part = 0, drawn = 0;
      const int own_parts = own_part_count();
      // The first stage's sums begin at zero: a turn of its own, since a condition there would serialise all.
      multiply_stage(std::false_type{}, [&] { fetch_words(own_parts); });
      for (int k = 1; k < steps; ++k) {
        multiply_stage(std::true_type{}, [&] {
          if (kMasks == Masks::kDrawn && drawn < Shape::kWarpRows) {
            draw_row(drawn++, own_parts, next_part);
          }
        });
      }
      while (kMasks == Masks::kDrawn && drawn < Shape::kWarpRows) {
        draw_row(drawn++, own_parts, next_part);
      }
      wait_products<0>(sum);
      release(held);
      wait_copies<0>();
      synchronize_warp();  // the words are there
      for_each_part([&](const RankPart& part, int stages) {
        for (int i = 0; i < stages; ++i, turn.next()) {
          barrier_wait(full(turn.stage), turn.parity);
          add_ranks(sum, part, part.ranks - i * Shape::kDepth);
          synchronize_warp();
          release(turn.stage);
        }
      });
      if (kForward && tables.bias != nullptr) {
        add_bias(sum);
      }
      store(sum);
    });
    wait_stored_boxes<0>();
  }

  // Tells the loading threads of the cluster. Each warp does: else a stage without ranks, which makes no
  // products, might be filled again before a slow warp has waited for it, and that warp would wait for ever.
  MLORA_DEVICE void release(int stage) const {
    const int lane = thread_index() & 31;
    if (stage >= 0 && lane < kCluster) {
      barrier_arrive(empty(stage), lane);
    }
  }

  // Starts copies of the tile's bias, or of the keep bits of the warp's rows, in words of 32 columns: 512
  // bytes either way.
  MLORA_DEVICE void fetch_words(int own_parts) const {
    if (kForward ? tables.bias == nullptr : kMasks == Masks::kNone) {
      return;
    }
    wait_stored_boxes<0>();  // the last tile has left
    synchronize_warp();
    if constexpr (kForward || kMasks == Masks::kStored) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = 32 * i + (thread_index() & 31);
        const void* from = tables.bias;
        int bytes = 0;
        if constexpr (kForward) {
          const int first = column + 2 * word;
          bytes = 2 * clamp(tables.columns - first, 2);
          from = static_cast<const T*>(tables.bias) + (bytes == 0 ? 0 : first);
        } else {
          const int row = warp_row() + word / 8, first = column + word % 8 * kWordColumns;
          from = tables.keep;
          if (own_parts > 0 && row < tables.rows && first < tables.columns) {
            bytes = 4;
            from = tables.keep + word_place(tables.rows, tables.columns, 0, row, first);
          }
        }
        copy_word_async(turn_bytes() + 4 * word, from, bytes);
      }
      commit_copies();
    }
  }

  // Draws the keep bits of the warp's i-th row: eight columns a lane. `index` is a part at or before the row.
  MLORA_DEVICE void draw_row(int i, int own_parts, int& index) const {
    const int row = warp_row() + i;
    const Tile* parts = tables.parts.parts + (own_parts > 0 ? read(tables.parts.starts + tile) : 0);
    Tile part = {};
    for (; index < own_parts; ++index) {
      part = read(parts + index);
      if (row < part.row + part.rows) {
        break;
      }
    }
    if (index >= own_parts || row < part.row) {
      return;
    }
    const int lane = thread_index() & 31;
    const Dropout dropout = dropout_of(tables.dropout, 0, part.adapter);
    const uint32_t philox_row = part.philox_row + static_cast<uint32_t>(row - part.row);
    const uint32_t counter = static_cast<uint32_t>(column / kCounterColumns + lane);
    uint32_t word = keep_bits(philox(dropout, philox_row, counter), dropout.threshold) << (lane % 4 * 4);
    word |= exchange(word, 1);
    word |= exchange(word, 2);
    if (lane % 4 == 0) {
      store_shared(turn_bytes() + 32 * static_cast<uint32_t>(i) + static_cast<uint32_t>(lane), word);
    }
  }

  // Adds the stage's at most 64 ranks, of `left` that there are, to the part's rows.
  MLORA_DEVICE void add_ranks(float (&sum)[128], const RankPart& part, int left) const {
    if (left > 48) {
      add_rank_steps<4>(sum, part);
    } else if (left > 32) {
      add_rank_steps<3>(sum, part);
    } else if (left > 16) {
      add_rank_steps<2>(sum, part);
    } else if (left > 0) {
      add_rank_steps<1>(sum, part);
    }
  }

  // 16 kSteps ranks. While 32 columns are added the next ones are multiplied.
  template <int kSteps>
  MLORA_DEVICE void add_rank_steps(float (&sum)[128], const RankPart& part) const {
    const uint32_t from = stage_bytes(turn.stage);
    const uint64_t a = operand<false>(from + warpgroup() * 64 * 128);
    const int lane = thread_index() & 31, row = warp_row() + lane / 4;
    // blocks of columns under way while one is added
    constexpr int kAhead = 1, kBlocks = Shape::kColumns / 32;
    float narrow[kAhead + 1][16];
    const auto begin_columns = [&](int block) {
      const uint64_t b = factor_operand(from + Shape::kRowsBytes + block * Shape::kFactorBoxBytes);
      begin_products();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        multiply_narrow(T{}, narrow[block % (kAhead + 1)], a + 2 * k, b + 64 * k, k > 0);
      }
      commit_products();
    };
    if (kAhead == 1) {
      begin_columns(0);
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block + kAhead < kBlocks) {
        begin_columns(block + kAhead);
        wait_products<kAhead>(narrow[block % (kAhead + 1)]);
      } else {
        wait_products<0>(narrow[block % (kAhead + 1)]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool own = row + 8 * half >= part.begin && row + 8 * half < part.end;
        uint32_t bits = ~0u;
        if constexpr (kMasks != Masks::kNone) {
          bits = load_shared(turn_bytes() + 32 * (lane / 4 + 8 * half) + 4 * block) >> (lane % 4);
          bits |= part.always;
        }
        bits = own ? bits : 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const int at = 4 * j + 2 * half + odd;
            if ((bits & 1u << (4 * j + 16 * odd)) != 0) {
              sum[16 * block + at] += narrow[block % (kAhead + 1)][at];
            }
          }
        }
      }
    }
  }

  MLORA_DEVICE void add_bias(float (&sum)[128]) const {
#pragma unroll
    for (int j = 0; j < Shape::kColumns / 8; ++j) {
      const uint32_t pair = load_shared(turn_bytes() + 16 * j + thread_index() % 4 * 4);
      const float even = to_float(T{static_cast<uint16_t>(pair)});
      const float odd = to_float(T{static_cast<uint16_t>(pair >> 16)});
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[4 * j + 2 * half] += even;
        sum[4 * j + 2 * half + 1] += odd;
      }
    }
  }

  // Each warp sends its rows, 64 columns at a time through two boxes in turn. They leave beside the next
  // tile's products; the map clips what lies beyond the matrix.
  MLORA_DEVICE void store(const float (&sum)[128]) const {
    const int lane = thread_index() & 31;
#pragma unroll
    for (int block = 0; block < Shape::kColumns / 64; ++block) {
      const uint32_t box = turn_bytes() + block % 2 * Shape::kTurnBoxBytes;
      wait_stored_boxes<1>();  // the box before the last has left
      synchronize_warp();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int at = 4 * (8 * block + j) + 2 * half;
          store_shared(box + 128 * (lane / 4 + 8 * half) + 16 * (j ^ lane / 4) + 4 * (lane % 4),
                       pack(T{}, sum[at], sum[at + 1]));
        }
      }
      show_to_copies();
      synchronize_warp();
      if (lane == 0) {
        if (tables.add) {
          add_box(&maps.out, column + 64 * block, warp_row(), box);
        } else {
          store_box(&maps.out, column + 64 * block, warp_row(), box);
        }
      }
    }
  }
};

#endif

}  // namespace mlora::cuda
