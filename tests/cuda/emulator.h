// The operations of csrc/cuda/primitives.cuh on a CPU, for tests: each CUDA thread is a fiber.
//
// What is undefined on a GPU is made visible. Shared memory begins as NaN; asynchronous copies destroy their
// destination at once and arrive at the wait; blocks run in a shuffled order, and threads in an order that
// changes at every turn; threads that do not meet at a barrier or a warp's operation end the process.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/kernels.h"
#include "cuda/numbers.h"

#define MLORA_ISA emulated
#include "cpu/scalars.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace mlora::cuda {

int thread_index();
int block_x();
int block_y();
int block_z();
int grid_x();
int grid_y();
int cluster_rank();  // of the block
void synchronize();
unsigned char* shared_memory();
uint32_t shared_address(const void* shared);
void copy_async(void* shared, const void* global, bool present);
void copy_word_async(uint32_t to, const void* global, int bytes);
void commit_copies();
void wait_for_copies(int pending);
uint32_t exchange(uint32_t value, int bit);

inline uint32_t pair_mask(uint32_t value) {
  return ((value >> 15 & 1u) != 0 ? 0x0000ffffu : 0u) | ((value >> 31) != 0 ? 0xffff0000u : 0u);
}
inline int take_ticket(int* ticket) { return (*ticket)++; }

// Counts an access to global memory.
void count_read(const void* place, int bytes);
void count_write(const void* place, int bytes);
// Counts matrix instructions of the warp.
void count_products(int count);
template <typename T>
T read(const T* place) {
  count_read(place, sizeof(T));
  return *place;
}
template <typename T>
void write(T* place, const T& value) {
  count_write(place, sizeof(T));
  *place = value;
}
inline float load_shared_sum(const float* place) { return read(place); }
inline Chunk<float> load_shared_sums(const float* place) {
  return read(reinterpret_cast<const Chunk<float>*>(place));
}

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return cpu::emulated::to_float(cpu::emulated::BF16{value.bits}); }
inline float to_float(Half value) { return cpu::emulated::to_float(cpu::emulated::Half{value.bits}); }
inline void from_float(float value, float& out) { out = value; }
inline void from_float(float value, BFloat16& out) {
  cpu::emulated::BF16 result;
  cpu::emulated::from_float(value, &result);
  out.bits = result.bits;
}
inline void from_float(float value, Half& out) {
  cpu::emulated::Half result;
  cpu::emulated::from_float(value, &result);
  out.bits = result.bits;
}

template <typename T>
uint32_t pack(T, float low, float high) {
  T first, second;
  from_float(low, first);
  from_float(high, second);
  return uint32_t{first.bits} | uint32_t{second.bits} << 16;
}

template <int kPending>
void wait_copies() {
  wait_for_copies(kPending);
}

void synchronize_warp();

// Called by all 32 lanes of a warp: the last one to arrive runs `work` on the operands of all.
using WarpWork = void (*)(void* const* operands);
void meet(WarpWork work, void* operands);

struct MatrixLanes {
  uint32_t* out;
  const void* row;
};
void load_matrices_work(void* const* operands);
void load_transposed_matrices_work(void* const* operands);

template <bool kTranspose>
void load_matrices(uint32_t (&out)[4], uint32_t address) {
  MatrixLanes lanes{out, shared_memory() + address};
  meet(kTranspose ? load_transposed_matrices_work : load_matrices_work, &lanes);
}

struct ProductLanes {
  float* sum;
  const uint32_t* a;
  uint32_t b[2];
};

// sum [16, 8] += a [16, 16] b [16, 8] in the register layouts of mma.m16n8k16
template <typename T>
void multiply_work(void* const* operands) {
  const auto half = [](uint32_t word, int odd) {
    return to_float(T{static_cast<uint16_t>(odd != 0 ? word >> 16 : word)});
  };
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const ProductLanes& own = *static_cast<ProductLanes*>(operands[lane]);
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int odd = 0; odd < 2; ++odd) {
      for (int i = 0; i < 4; ++i) {
        a[group + i % 2 * 8][pair + odd + i / 2 * 8] = half(own.a[i], odd);
      }
      b[pair + odd][group] = half(own.b[0], odd);
      b[pair + odd + 8][group] = half(own.b[1], odd);
    }
  }
  for (int row = 0; row < 16; ++row) {
    float sums[8] = {};
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) {
        sums[column] += a[row][k] * b[k][column];
      }
    }
    for (int column = 0; column < 8; ++column) {
      const ProductLanes& own = *static_cast<ProductLanes*>(operands[row % 8 * 4 + column / 2]);
      own.sum[row / 8 * 2 + column % 2] += sums[column];
    }
  }
}

template <typename T>
void multiply(T, float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  count_products(1);
  ProductLanes lanes{sum, a, {b0, b1}};
  meet(multiply_work<T>, &lanes);
}

struct Grid {
  int64_t x = 1;
  int64_t y = 1;
  int64_t z = 1;
  int cluster = 1;  // neighbours along x that run together
};

int most_shared_bytes(const Queue&);
int multiprocessors(const Queue&);
// Returns the error that a test asked for, or 0.
int run_grid(const char* name, const Grid& grid, int threads, int shared_bytes, void (*run)(const void*),
             const void* call);

struct PageArguments;
struct ProductMaps;

// Which launch has these arguments.
inline const char* launch_of(const Batch&) { return "plan"; }
inline const char* launch_of(const PartTables&) { return "parts"; }
inline const char* launch_of(const PageArguments&) { return "page"; }
inline const char* launch_of(const ProductMaps&) { return "product"; }
inline const char* launch_of(const ShrinkArguments&) { return "shrink"; }
inline const char* launch_of(const ExpandArguments&) { return "expand"; }
inline const char* launch_of(const ReadDyArguments&) { return "read_dy"; }
inline const char* launch_of(const GradientArguments&) { return "read_x"; }
template <typename T>
const char* launch_of(const T&) {
  return "other";
}

template <typename... Parameters, typename First, typename... Arguments>
int launch(void (*kernel)(Parameters...), const Grid& grid, int threads, int shared_bytes, const Queue&,
           const First& first, const Arguments&... arguments) {
  const auto call = [&] { kernel(first, arguments...); };
  return run_grid(
      launch_of(first), grid, threads, shared_bytes,
      [](const void* f) { (*static_cast<decltype(call)*>(f))(); }, &call);
}

}  // namespace mlora::cuda
