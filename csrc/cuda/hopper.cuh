// Machine operations of sm_90a beside those of primitives.cuh: copies of whole boxes by the copy engine
// (TMA), barriers in shared memory that count them, asynchronous products of four warps, and clusters of
// blocks. With MLORA_EMULATE emulator_hopper.h of the tests provides them.
//
// A box is rows of 64 or 128 bytes, swizzled: the 16-byte chunk c of row r stands in place c ^ (r / 2 % 4),
// or c ^ r % 8, of its row, as in a SharedTile. Boxes begin at multiples of 1 KiB.
#pragma once

#include "cuda/primitives.cuh"

#ifdef MLORA_EMULATE
#include "emulator_hopper.h"
#else

#include <cuda.h>

namespace mlora::cuda {

using TensorMap = CUtensorMap;

// What this build or this device cannot run: cudaErrorNotSupported.
constexpr int kNotSupported = cudaErrorNotSupported;

// Boxes [box_rows, box_columns] of a matrix [rows, columns] of bf16 or fp16, whose rows begin `stride`
// numbers apart. Copies read zeros beyond the matrix, and write nothing there. The driver's library is not
// linked, so that machines without a driver can load this one.
inline int make_map(TensorMap& map, Scalar type, const void* data, int64_t rows, int64_t columns,
                    int64_t stride, int box_rows, int box_columns) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  if (encode == nullptr) {
    return kNotSupported;
  }
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUtensorMapDataType numbers =
      type == Scalar::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(&map, numbers, 2, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Whether a device has the operations of this file.
inline bool is_hopper(const Queue& queue) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, queue.device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, queue.device);
  return major == 9 && minor == 0;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MLORA_DEVICE __device__ __forceinline__

// The block's place in its cluster; its neighbours in the grid are the others.
template <int kCluster>
MLORA_DEVICE int cluster_rank() {
  return block_x() % kCluster;
}
MLORA_DEVICE int grid_x() { return static_cast<int>(gridDim.x); }

// Until all threads of the cluster are here; whole warps.
template <int kCluster>
MLORA_DEVICE void synchronize_cluster() {
  synchronize_warp();
  if constexpr (kCluster > 1) {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  } else {
    synchronize();
  }
}

// How many registers each thread of a warpgroup has from here on.
template <int kRegisters>
MLORA_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
MLORA_DEVICE void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A barrier is eight bytes of shared memory. A phase of it ends when `count` threads have arrived and all
// bytes that they expect have come. Default semantics: `.release.cluster` would fence all of global memory.
MLORA_DEVICE void barrier_begin(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// After the barriers of a block have begun, before others use them.
MLORA_DEVICE void barriers_have_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MLORA_DEVICE void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// At the barrier of a block of the cluster.
MLORA_DEVICE void barrier_arrive(uint32_t barrier, int rank) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Until the phase of this parity has ended; the first one has parity 0. Built with WATCHED, a thread that
// waits for seconds says where, and ends the launch with an error.
MLORA_DEVICE void barrier_wait(uint32_t barrier, int parity) {
#ifdef WATCHED
  for (int64_t turn = 0; turn < int64_t{1} << 26; ++turn) {
    uint32_t done;
    asm volatile(
        "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, "
        "done; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done != 0) {
      return;
    }
  }
  printf("block %d, thread %d: waits for ever at barrier %u, parity %d\n", block_x(), thread_index(), barrier,
         parity);
  __trap();
#endif
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
      "@done bra through; bra again; through: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

MLORA_DEVICE void fetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// The box from (column, row) on comes to `to`; the barrier counts its bytes.
MLORA_DEVICE void load_box(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// To the same place in both blocks of a cluster, and counted by the barrier of each.
MLORA_DEVICE void load_box_for_both(uint32_t to, const TensorMap* map, int column, int row,
                                    uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}
// What this thread has written to shared memory is seen by boxes that leave after it.
MLORA_DEVICE void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The box at `from` goes to (column, row); a group of its own.
MLORA_DEVICE void store_box(const TensorMap* map, int column, int row, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3]; "
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
// As store_box; the numbers are added to those that are there, and rounded once more.
MLORA_DEVICE void add_box(const TensorMap* map, int column, int row, uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3]; "
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
// Until all boxes of this thread but the latest kPending have been read from shared memory.
template <int kPending>
MLORA_DEVICE void wait_stored_boxes() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Two numbers go to the same place in a block of the cluster, whose barrier counts their eight bytes.
MLORA_DEVICE void send_pair(uint32_t to, int rank, float low, float high, uint32_t barrier) {
  asm volatile(
      "{ .reg .b32 place, counter; mapa.shared::cluster.u32 place, %0, %4; "
      "mapa.shared::cluster.u32 counter, %1, %4; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [place], {%2, %3}, [counter]; }" ::"r"(
          to),
      "r"(barrier), "f"(low), "f"(high), "r"(rank)
      : "memory");
}

MLORA_DEVICE void store_shared(uint32_t to, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
MLORA_DEVICE uint32_t load_shared(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
// As copy_async, of the first `bytes` of four; the others become zeros.
MLORA_DEVICE void copy_word_async(uint32_t to, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}

// Products of a warpgroup run until a wait; until then nobody may touch their sums or operands. Between begin
// and commit there is no branch: ptxas would end each product by itself.
MLORA_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MLORA_DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
MLORA_DEVICE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define MLORA_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define MLORA_8(i) MLORA_4(i), MLORA_4(i + 4)
#define MLORA_16(i) MLORA_8(i), MLORA_8(i + 8)
#define MLORA_32(i) MLORA_16(i), MLORA_16(i + 16)
#define MLORA_64(i) MLORA_32(i), MLORA_32(i + 32)

// These sums pass through the wait, so no use of them is moved before it.
template <int kPending>
MLORA_DEVICE void wait_products(float (&sum)[128]) {
  asm volatile("wgmma.wait_group.sync.aligned %128;" : MLORA_64(0), MLORA_64(64) : "n"(kPending) : "memory");
}
template <int kPending>
MLORA_DEVICE void wait_products(float (&sum)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : MLORA_32(0) : "n"(kPending) : "memory");
}
template <int kPending>
MLORA_DEVICE void wait_products(float (&sum)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned %16;" : MLORA_16(0) : "n"(kPending) : "memory");
}
template <int kPending>
MLORA_DEVICE void wait_products(float (&sum)[8]) {
  asm volatile("wgmma.wait_group.sync.aligned %8;" : MLORA_8(0) : "n"(kPending) : "memory");
}

#define MLORA_WIDE(type)                                                                                  \
  asm volatile(                                                                                           \
      "{ .reg .pred add; setp.ne.b32 add, %130, 0; "                                                      \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                        \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                  \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                  \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
      "%128, %129, add, 1, 1, 0, %131; }"                                                                 \
      : MLORA_64(0), MLORA_64(64)                                                                         \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kAcross ? 1 : 0))
#define MLORA_NARROW(type, columns, sums, numbers, add, a_b, across)                                      \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, " add ", 0; wgmma.mma_async.sync.aligned.m64n" columns \
               "k16.f32." type "." type " {" numbers "}, " a_b ", add, 1, 1, " across "; }"               \
               : sums                                                                                     \
               : "l"(a), "l"(b), "r"(static_cast<int>(add_to)), "n"(kAAcross ? 1 : 0),                    \
                 "n"(kBAcross ? 1 : 0))
#define MLORA_NARROWS(type)                                                                                 \
  if constexpr (kCount == 8) {                                                                              \
    MLORA_NARROW(type, "16", MLORA_8(0), "%0, %1, %2, %3, %4, %5, %6, %7", "%10", "%8, %9", "%11, %12");    \
  } else if constexpr (kCount == 16) {                                                                      \
    MLORA_NARROW(type, "32", MLORA_16(0),                                                                   \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", "%18", "%16, %17", \
                 "%19, %20");                                                                               \
  } else {                                                                                                  \
    static_assert(kCount == 32);                                                                            \
    MLORA_NARROW(                                                                                           \
        type, "64", MLORA_32(0),                                                                            \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "        \
        "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",                                       \
        "%34", "%32, %33", "%35, %36");                                                                     \
  }

// sum [64, 256] (+)= a [64, 16] b [16, 256], in the layout of a Fragment<1, 32>: 16 rows a warp. a and b are
// descriptors; kAcross: b's rows of memory run along its columns, else along the summed dimension.
template <bool kAcross>
MLORA_DEVICE void multiply_wide(BFloat16, float (&sum)[128], uint64_t a, uint64_t b, bool add) {
  MLORA_WIDE("bf16");
}
template <bool kAcross>
MLORA_DEVICE void multiply_wide(Half, float (&sum)[128], uint64_t a, uint64_t b, bool add) {
  MLORA_WIDE("f16");
}
// sum [64, 2 kCount] (+)= a [64, 16] b [16, 2 kCount], in the same layout. kAAcross: a's rows of memory run
// along the product's rows.
template <bool kAAcross = false, bool kBAcross = true, int kCount>
MLORA_DEVICE void multiply_narrow(BFloat16, float (&sum)[kCount], uint64_t a, uint64_t b, bool add_to) {
  MLORA_NARROWS("bf16")
}
template <bool kAAcross = false, bool kBAcross = true, int kCount>
MLORA_DEVICE void multiply_narrow(Half, float (&sum)[kCount], uint64_t a, uint64_t b, bool add_to) {
  MLORA_NARROWS("f16")
}

#undef MLORA_NARROWS
#undef MLORA_NARROW
#undef MLORA_WIDE
#undef MLORA_64
#undef MLORA_32
#undef MLORA_16
#undef MLORA_8
#undef MLORA_4
#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace mlora::cuda
#endif
