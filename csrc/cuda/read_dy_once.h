// read_dy in one pass over dy, by clusters of eight blocks; torch-free.
//
// Letters: O columns of dy, M splits, R largest rank.
#pragma once

#include "cuda/kernels.h"

namespace mlora::cuda {

// Blocks of a cluster; columns of dy that a block takes; ranks that a program takes at most.
constexpr int kOnceCluster = 8;
constexpr int kOnceColumns = 256;
constexpr int kOnceRanks = 64;

// Clusters that share a sum over columns.
MLORA_HD int once_clusters(int columns) { return ceil_div(columns, kOnceCluster * kOnceColumns); }

// Numbers of a row of partial sums of ds.
MLORA_HD int once_sums(int ranks) { return ceil_div(ranks, 4) * 4; }

// How many tickets the sums of ds take, where several clusters share one.
inline int64_t once_tickets(int64_t splits, int64_t ranks) {
  return splits * ceil_div(ranks, kOnceRanks) * kOnceCluster;
}

// Whether launch_read_dy goes this way: where it is asked for, on sm_90, where the build has code for sm_90a,
// and rows of dy are of 16 bits and begin at multiples of 16 bytes. Sums over columns then are those of
// `once_clusters`.
bool reads_dy_once(const ReadDyArguments& arguments, const Queue& queue);
int launch_read_dy_once(ReadDyArguments arguments, const Queue& queue);

}  // namespace mlora::cuda
