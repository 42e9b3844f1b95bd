// The operations of csrc/cuda/hopper.cuh on a CPU, for tests.
//
// What is undefined on a GPU is made visible. A box destroys its destination when it is asked for and comes
// later, in any order, to each block of a cluster on its own, and so do pairs of numbers; a box that is sent
// away is read as late as a wait allows. Products are made as late as a wait allows, and their sums are NaN
// until then. What a thread has not shown to copies leaves as NaN, and is NaN to products. Clusters of
// threads that wait for ever, arrivals too often, and boxes, pairs and arrivals for a block that may have
// left end the process.
#pragma once

#include "emulator.h"

#define MLORA_DEVICE inline

namespace mlora::cuda {

struct TensorMap {
  Scalar type;
  const void* data;
  int64_t rows;
  int64_t columns;
  int64_t stride;
  int box_rows;
  int box_columns;
};

constexpr int kNotSupported = 801;

int make_map(TensorMap& map, Scalar type, const void* data, int64_t rows, int64_t columns, int64_t stride,
             int box_rows, int box_columns);
bool is_hopper(const Queue&);

template <int kCluster>
int cluster_rank() {
  return cluster_rank();
}
void synchronize_cluster();
template <int kCluster>
void synchronize_cluster() {
  synchronize_cluster();
}
template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void leave_registers() {}

void barrier_begin(uint32_t barrier, int count);
void barriers_have_begun();
void barrier_expect(uint32_t barrier, int bytes);
void barrier_arrive(uint32_t barrier, int rank);
void barrier_wait(uint32_t barrier, int parity);

inline void fetch_map(const TensorMap*) {}
void load_box(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier);
void load_box_for_both(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier);
void send_pair(uint32_t to, int rank, float low, float high, uint32_t barrier);
void show_to_copies();
void send_box(const TensorMap* map, int column, int row, uint32_t from, bool add);
inline void store_box(const TensorMap* map, int column, int row, uint32_t from) {
  send_box(map, column, row, from, false);
}
inline void add_box(const TensorMap* map, int column, int row, uint32_t from) {
  send_box(map, column, row, from, true);
}
void wait_for_stored_boxes(int pending);
template <int kPending>
void wait_stored_boxes() {
  wait_for_stored_boxes(kPending);
}

void store_shared(uint32_t to, uint32_t word);
uint32_t load_shared(uint32_t from);

void begin_products();
void commit_products();
void wait_for_products(int pending);
template <int kPending>
void wait_products() {
  wait_for_products(kPending);
}
template <int kPending, int kCount>
void wait_products(float (&)[kCount]) {
  wait_for_products(kPending);
}
// sum: this thread's `count` numbers of sum [64, 2 count]
void add_product(Scalar type, float* sum, int count, bool a_across, bool b_across, uint64_t a, uint64_t b,
                 bool add);
inline Scalar scalar_of(BFloat16) { return Scalar::kBFloat16; }
inline Scalar scalar_of(Half) { return Scalar::kHalf; }
template <bool kAcross, typename T>
void multiply_wide(T, float (&sum)[128], uint64_t a, uint64_t b, bool add) {
  add_product(scalar_of(T{}), sum, 128, false, kAcross, a, b, add);
}
template <bool kAAcross = false, bool kBAcross = true, typename T, int kCount>
void multiply_narrow(T, float (&sum)[kCount], uint64_t a, uint64_t b, bool add) {
  add_product(scalar_of(T{}), sum, kCount, kAAcross, kBAcross, a, b, add);
}

}  // namespace mlora::cuda
