// One block of read_dy where a cluster of eight reads dy once:
//
//   ds[t, j] = scaling Σ_c dy[t, c] B[c, j] / (1 - p)        dB[c, j] = Σ_t s[t, j] dy[t, c]
//
// Oracle: mlora_ext/ops/reference.py, in fp64 (tests/cuda/test_read_dy_once.py).
//
// The cluster walks over the tiles of one split, each block over 256 columns of its own. A tile's part of dy
// comes into shared memory once, and two warpgroups multiply with it: the first by the block's part of B,
// which stays in shared memory; the second by s, into a sum of dB that stays in its registers.
//
// ds needs the sum over the cluster. Block b adds up rows b, b + 8, ... of each tile, whose parts all blocks
// send to it, in the order of columns. A barrier of the receiver counts what comes, so nobody waits for the
// cluster: the parts of a tile arrive during the next one's products. Two buffers suffice: a warp sends parts
// of a tile after it has those of the tile before, from every warp of every block, and these sent them after
// they had added up the one before that.
//
// Where dy has more than 2048 columns several clusters serve a split. They write fp32 sums, and per split the
// last one of them, as a ticket says, adds these up. So the order of each sum follows from columns alone.
#pragma once

#include "cuda/dispatch.cuh"
#include "cuda/dropout_tile.cuh"
#include "cuda/factor_tile.cuh"
#include "cuda/gradient.cuh"
#include "cuda/hopper.cuh"
#include "cuda/read_dy_once.h"
#include "cuda/tickets.cuh"

namespace mlora::cuda {

template <int kRanks, int kStages>
struct OnceShape {
  // A tile's rows lie in slabs of 64 columns, as matrix instructions take them.
  static constexpr int kSlab = 64;
  static constexpr int kSlabs = kOnceColumns / kSlab;
  static constexpr int kSlabBytes = kTileRows * kSlab * 2;
  static constexpr int kRowBytes = kSlabs * kSlabBytes;
  static constexpr int kStageBytes = kRowBytes + kTileRows * kRanks * 2;  // the rows; s
  static constexpr int kFactorSlabBytes = kRanks * kSlab * 2;
  static constexpr int kFactor = kStages * kStageBytes;
  // Parts of the block's eight rows of ds: of each block of the cluster, [R / 8, 8 rows, 8 ranks].
  static constexpr int kOwnRows = kTileRows / kOnceCluster;
  static constexpr int kPart = kOwnRows * kRanks;
  static constexpr int kParts = kFactor + kSlabs * kFactorSlabBytes;
  static constexpr int kPartsBytes = kOnceCluster * kPart * 4;
  static constexpr int kTiles = kParts + 2 * kPartsBytes;
  static constexpr int kBarriers = kTiles + kSplitTiles * static_cast<int>(sizeof(Tile));
  static constexpr int kShared = kBarriers + 2 * 8;
  // At the end dB [R, 256] stands where the stages were, beside the word of `is_last`.
  static constexpr int kSums = 16;
  static constexpr int kSumRow = kOnceColumns + 4;  // so that a warp's numbers lie in different banks
  static_assert(kSums + kRanks * kSumRow * 4 <= kFactor && kShared <= 227 * 1024);
};

#if defined(MLORA_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Descriptor of an operand whose rows of kBytes lie one after the other, swizzled as SharedTile does.
template <int kBytes>
MLORA_DEVICE uint64_t operand_of(uint32_t address) {
  constexpr uint64_t kGroup = 8 * kBytes >> 4, kSwizzle = kBytes == 128 ? 1 : kBytes == 64 ? 2 : 3;
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{1} << 16 | kGroup << 32 | kSwizzle << 62;
}

// One block. kRanks hold the adapter's own ranks of the panel; `number` is the cluster's, of those of its
// split.
template <typename T, int kRanks, int kStages>
class OnceBlock {
  using Shape = OnceShape<kRanks, kStages>;
  using Slab = SharedTile<T, Shape::kSlab>;
  static constexpr int kHalf = kThreads / 2;
  static constexpr int kAtOnce = 4;  // chunks of four sums that a thread loads before it needs one

 public:
  MLORA_DEVICE OnceBlock(const ReadDyArguments& arguments, int layer, const Split& own_split, int number,
                         int own_panel, int own_ticket)
      : ds(arguments.ds[layer]),
        gradient(arguments.gradient[layer]),
        need_ds(arguments.need_ds),
        need_gradient(arguments.need_gradient),
        split(own_split),
        tile_count(own_split.tile_end - own_split.tile_begin),
        cluster(number),
        block(cluster_rank<kOnceCluster>()),
        panel(own_panel),
        first_rank(own_panel * kOnceRanks),
        ticket(own_ticket * kOnceCluster + block),
        first_column((number * kOnceCluster + block) * kOnceColumns),
        columns(clamp(gradient.columns - first_column, kOnceColumns)),
        factor(gradient.factor, row_of(gradient.factor, 0, own_split.adapter), first_rank, kRanks),
        shared(shared_memory()) {}

  MLORA_DEVICE void run() {
    begin();
    const bool of_ds = need_ds && thread_index() < kHalf;
    const bool of_gradient = need_gradient && columns > 0 && thread_index() >= kHalf;
    float sum[Shape::kSlabs][kRanks / 2];
#pragma unroll 1
    for (int i = 0; i < tile_count; ++i) {
      advance(i);
      if (of_ds) {
        make_ds(i);
      } else if (of_gradient) {
        add_gradient(i, sum);
      }
    }
    synchronize();  // the last stage has been read
    if (of_ds && tile_count > 0) {
      add_parts(tile_count - 1);
    } else if (of_gradient) {
      lay_down(sum);
    }
    if (need_ds && ds.parts > 1 && is_last(ds.partial.tickets + ticket, ds.parts)) {
      join_clusters();
    }
    synchronize();  // no thread leaves before all parts have come, and dB is where the stages were
    if (need_gradient && columns > 0) {
      write_gradient();
    }
  }

 private:
  const ShrinkArguments& ds;
  const GradientArguments& gradient;
  const bool need_ds;
  const bool need_gradient;
  const Split split;
  const int tile_count;
  const int cluster;
  const int block;
  const int panel;
  const int first_rank;
  const int ticket;
  const int first_column;
  const int columns;  // 0: the block has no part of dy; it loads nothing and sends zeros
  const Panel<T> factor;
  unsigned char* const shared;
  float scale = 0.0f;

  MLORA_DEVICE Tile* tiles() const { return reinterpret_cast<Tile*>(shared + Shape::kTiles); }
  MLORA_DEVICE unsigned char* stage(int i) const { return shared + i % kStages * Shape::kStageBytes; }
  MLORA_DEVICE int parts(int i) const { return Shape::kParts + i % 2 * Shape::kPartsBytes; }
  MLORA_DEVICE uint32_t barrier(int i) const { return shared_address(shared + Shape::kBarriers + i % 2 * 8); }
  MLORA_DEVICE float* sums(int rank) const {
    return reinterpret_cast<float*>(shared + Shape::kSums) + rank * Shape::kSumRow;
  }

  MLORA_DEVICE void begin() {
    if (thread_index() < tile_count) {
      tiles()[thread_index()] = read(gradient.plan.tiles + split.tile_begin + thread_index());
    }
    if (thread_index() == 0) {
      barrier_begin(barrier(0), 1);
      barrier_begin(barrier(1), 1);
      barriers_have_begun();
    }
    if (need_ds) {
      scale = read(ds.scaling + split.adapter) * dropout_of(ds.dropout, 0, split.adapter).keep_scale;
    }
    synchronize();
    // A factor that is converted is loaded without copies: under those of the first tiles.
    const int of_factor = factor.convert ? kStages - 1 : 0;
#pragma unroll 1
    for (int step = 0; step < kStages; ++step) {
      if (step == of_factor && need_ds && columns > 0) {
        load_factor();
      }
      if (step < kStages - 1) {
        fetch(step);
      }
    }
    synchronize_cluster<kOnceCluster>();  // all barriers have begun
  }

  // Numbers that are converted wait in registers, so that all of them are under way at once.
  MLORA_DEVICE void load_factor() const {
    const auto slab = [&](int i) {
      return Slab{reinterpret_cast<T*>(shared + Shape::kFactor + i * Shape::kFactorSlabBytes)};
    };
    const auto load = [&](auto aligned) {
      FactorLoad<T, kRanks, Shape::kSlab, true, decltype(aligned)::value> slabs[Shape::kSlabs];
#pragma unroll
      for (int i = 0; i < Shape::kSlabs; ++i) {
        const int column = i * Shape::kSlab;
        slabs[i].begin(slab(i), factor, first_column + column, columns - column);
      }
#pragma unroll
      for (int i = 0; i < Shape::kSlabs; ++i) {
        slabs[i].end(slab(i), factor);
      }
    };
    gradient.factor.aligned ? load(std::true_type{}) : load(std::false_type{});
  }

  // Begins to copy tile i.
  MLORA_DEVICE void fetch(int i) const {
    if (i < tile_count && columns > 0) {
      const Tile tile = tiles()[i];
      const T* rows = row_at(static_cast<const T*>(gradient.rows.data), gradient.rows.stride, tile.row);
#pragma unroll
      for (int slab = 0; slab < Shape::kSlabs; ++slab) {
        const Slab to{reinterpret_cast<T*>(stage(i) + slab * Shape::kSlabBytes)};
        const int column = slab * Shape::kSlab;
        load_rows<kTileRows, true>(to, rows + first_column + column, gradient.rows.stride, tile.rows,
                                   columns - column);
      }
      const SharedTile<T, kRanks> to{reinterpret_cast<T*>(stage(i) + Shape::kRowBytes)};
      const T* s = row_at(static_cast<const T*>(gradient.s.data), gradient.s.stride, tile.row) + first_rank;
      const auto load = [&](auto aligned) {
        load_rows<kTileRows, decltype(aligned)::value>(to, s, gradient.s.stride, tile.rows, factor.ranks,
                                                       kTileRows, whole_blocks(factor.ranks));
      };
      if (need_gradient) {
        gradient.s.aligned ? load(std::true_type{}) : load(std::false_type{});
      }
    }
    commit_copies();
  }

  // Until tile i is there, for matrix instructions too; the stage of the tile before is free from here on.
  MLORA_DEVICE void advance(int i) const {
    wait_copies<kStages - 2>();
    show_to_copies();
    synchronize();
    fetch(i + kStages - 1);
  }

  // Of tile i, by the first warpgroup. Its part of the tile before is added up beside the products.
  MLORA_DEVICE void make_ds(int i) const {
    float sum[kRanks / 2];
    const uint32_t rows = shared_address(stage(i)), of_factor = shared_address(shared + Shape::kFactor);
    begin_products();
#pragma unroll
    for (int k = 0; k < kOnceColumns / 16; ++k) {
      const int slab = k / 4, along = k % 4 * 32;
      multiply_narrow<false, false>(T{}, sum, operand_of<128>(rows + slab * Shape::kSlabBytes + along),
                                    operand_of<128>(of_factor + slab * Shape::kFactorSlabBytes + along),
                                    k > 0);
    }
    commit_products();
    if (i > 0) {
      add_parts(i - 1);
    }
    wait_products<0>(sum);
    send(i, sum);
  }

  // Sends each block its rows of this block's part of tile i, after all lanes have added up parts before.
  MLORA_DEVICE void send(int i, const float (&sum)[kRanks / 2]) const {
    synchronize_warp();
    if (thread_index() == 0) {
      barrier_expect(barrier(i), kOnceCluster * Shape::kOwnRows * ceil_div(factor.ranks, 8) * 32);
    }
    const uint32_t to = shared_address(shared + parts(i)) +
                        4 * (block * Shape::kPart + 16 * warp_index() + fragment_column());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kRanks / 8; ++j) {
        if (8 * j < factor.ranks) {
          const float* pair = sum + 4 * j + 2 * half;
          send_pair(to + 4 * (j * Shape::kOwnRows + half) * 8, fragment_row(), columns > 0 ? pair[0] : 0.0f,
                    columns > 0 ? pair[1] : 0.0f, barrier(i));
        }
      }
    }
  }

  // Adds up the parts of the block's own rows of tile i, and writes ds, or the cluster's sum of it.
  MLORA_DEVICE void add_parts(int i) const {
    barrier_wait(barrier(i), i / 2 & 1);
    const Tile tile = tiles()[i];
    const float* part = reinterpret_cast<const float*>(shared + parts(i));
    const int width = clamp(ds.ranks - first_rank, kOnceRanks);
    for (int index = thread_index(); index < ceil_div(width, 8) * 8 * Shape::kOwnRows; index += kHalf) {
      const int row = block + index / 8 % Shape::kOwnRows * kOnceCluster;
      const int rank = index / (8 * Shape::kOwnRows) * 8 + index % 8;
      if (row >= tile.rows || rank >= width) {
        continue;
      }
      float sum = 0.0f;
      if (rank < factor.ranks) {
#pragma unroll
        for (int k = 0; k < kOnceCluster; ++k) {
          sum += part[k * Shape::kPart + index];
        }
      }
      if (ds.parts > 1 && rank < factor.ranks) {
        write(partial(cluster, tile.row + row) + rank, sum);
      } else if (cluster == 0) {
        write_ds(tile.row + row, rank, sum);
      }
    }
  }

  MLORA_DEVICE void write_ds(int row, int rank, float sum) const {
    T rounded;
    from_float(scale * sum, rounded);
    write(static_cast<T*>(ds.out) + int64_t{row} * ds.ranks + first_rank + rank, rounded);
  }

  MLORA_DEVICE float* partial(int of_cluster, int row) const {
    return ds.partial.sums + (of_cluster * ds.rows_total + row) * once_sums(ds.ranks) + first_rank;
  }

  // Adds up the clusters' sums of the block's own rows.
  MLORA_DEVICE void join_clusters() const {
    const int chunks = ceil_div(factor.ranks, 4);
    const int count = tile_count * Shape::kOwnRows * chunks;
    for (int first = thread_index(); first < count; first += kAtOnce * kThreads) {
      int row[kAtOnce], rank[kAtOnce];
      Chunk<float> sum[kAtOnce] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int index = first + k * kThreads;
        const int own = block + index / chunks % Shape::kOwnRows * kOnceCluster;
        rank[k] = index % chunks * 4;
        row[k] = -1;
        if (index < count) {
          const Tile tile = tiles()[index / chunks / Shape::kOwnRows];
          row[k] = own < tile.rows ? tile.row + own : -1;
        }
      }
#pragma unroll 2
      for (int of_cluster = 0; of_cluster < ds.parts; ++of_cluster) {
        add_chunks(sum, [&](int k) { return row[k] < 0 ? nullptr : partial(of_cluster, row[k]) + rank[k]; });
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (row[k] >= 0 && rank[k] + i < factor.ranks) {
            write_ds(row[k], rank[k] + i, sum[k].value[i]);
          }
        }
      }
    }
  }

  // sum[k] += the four sums at place(k), unless that is null.
  template <typename Place>
  MLORA_DEVICE static void add_chunks(Chunk<float> (&sum)[kAtOnce], Place&& place) {
    Chunk<float> more[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float* from = place(k);
      more[k] = from == nullptr ? Chunk<float>{} : load_shared_sums(from);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[k].value[i] += more[k].value[i];
      }
    }
  }

  // Adds tile i, by the second warpgroup. sum: [256 columns, R]
  MLORA_DEVICE void add_gradient(int i, float (&sum)[Shape::kSlabs][kRanks / 2]) const {
    const uint32_t rows = shared_address(stage(i)), s = rows + Shape::kRowBytes;
    begin_products();
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
#pragma unroll
      for (int k = 0; k < kTileRows / 16; ++k) {
        multiply_narrow<true, true>(T{}, sum[slab],
                                    operand_of<128>(rows + slab * Shape::kSlabBytes + k * 16 * 128),
                                    operand_of<2 * kRanks>(s + k * 16 * 2 * kRanks), i + k > 0);
      }
    }
    commit_products();
    wait_products<0>();
  }

  // Lays the sums of dB where the stages were.
  MLORA_DEVICE void lay_down(float (&sum)[Shape::kSlabs][kRanks / 2]) const {
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      wait_products<0>(sum[slab]);
      const int column = slab * Shape::kSlab + warp_index() % 4 * 16 + fragment_row();
#pragma unroll
      for (int j = 0; j < kRanks / 2; ++j) {
        sums(j / 4 * 8 + fragment_column() + j % 2)[column + j / 2 % 2 * 8] =
            tile_count > 0 ? sum[slab][j] : 0.0f;
      }
    }
  }

  // dB of the block's columns, or its partial sums; the last program of the adapter's adds these up.
  MLORA_DEVICE void write_gradient() const {
    const int column = thread_index() % (kOnceColumns / 4) * 4;
    const GradientOut<T> out{gradient, split, 0, first_rank, first_column};
    const auto rank_of = [](int first, int k) { return first + k * (kThreads / (kOnceColumns / 4)); };
    // f(first): a thread has ranks rank_of(first, k) of four columns
    const auto for_each = [&](auto&& f) {
      const int step = rank_of(0, kAtOnce);
      for (int first = thread_index() / (kOnceColumns / 4); column < columns && first < factor.ranks;
           first += step) {
        f(first);
      }
    };
    const auto write_final = [&](int first, const Chunk<float>(&value)[kAtOnce]) {
      const auto write_as = [&](auto* to) { write_numbers(to, rank_of, first, column, value); };
      if (gradient.factor.type == Scalar::kFloat) {
        write_as(static_cast<float*>(gradient.gradient));
      } else {
        write_as(static_cast<T*>(gradient.gradient));
      }
    };
    const bool fits = has_slots(gradient, split);
    if (split.slot < 0 || !fits) {
      for_each([&](int first) {
        Chunk<float> value[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int rank = rank_of(first, k) < kRanks ? rank_of(first, k) : 0;
          value[k] = *reinterpret_cast<const Chunk<float>*>(sums(rank) + column);
          if (!fits) {
            value[k] = {{NAN, NAN, NAN, NAN}};
          }
        }
        write_final(first, value);
      });
      return;
    }
    const auto place = [&](int slot, int rank) {
      return out.partial(slot) + int64_t{rank} * gradient.columns + column;
    };
    for_each([&](int first) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int rank = rank_of(first, k);
        if (rank < factor.ranks) {
          write(reinterpret_cast<Chunk<float>*>(place(split.slot, rank)),
                *reinterpret_cast<const Chunk<float>*>(sums(rank) + column));
        }
      }
    });
    const Group group = read(gradient.plan.groups + split.adapter);
    const int own =
        (panel * gradient.factor.adapters + split.adapter) * ceil_div(gradient.columns, kOnceColumns) +
        first_column / kOnceColumns;
    if (is_last(gradient.partial.tickets + own, group.slot_count)) {
      for_each([&](int first) {
        Chunk<float> value[kAtOnce] = {};
#pragma unroll 2
        for (int slot = group.slot_begin; slot < group.slot_begin + group.slot_count; ++slot) {
          add_chunks(value, [&](int k) {
            const int rank = rank_of(first, k);
            return rank < factor.ranks ? place(slot, rank) : nullptr;
          });
        }
        write_final(first, value);
      });
    }
  }

  // Writes numbers of dB, or adds them to what is there, which is read at once.
  template <typename Number, typename RankOf>
  MLORA_DEVICE void write_numbers(Number* to, RankOf&& rank_of, int first, int column,
                                  const Chunk<float> (&value)[kAtOnce]) const {
    const FactorRow& row = row_of(gradient.factor, 0, split.adapter);
    const int64_t rank_stride = row.grad_rank_stride, column_stride = row.grad_column_stride;
    to += row.grad_offset + first_rank * rank_stride + (first_column + column) * column_stride;
    const auto place = [&](int k, int i) { return to + rank_of(first, k) * rank_stride + i * column_stride; };
    float before[kAtOnce][4] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (gradient.add && rank_of(first, k) < factor.ranks) {
          before[k][i] = to_float(read(place(k, i)));
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (rank_of(first, k) < factor.ranks) {
          Number rounded;
          from_float(gradient.add ? before[k][i] + value[k].value[i] : value[k].value[i], rounded);
          write(place(k, i), rounded);
        }
      }
    }
  }
};

#endif

}  // namespace mlora::cuda
