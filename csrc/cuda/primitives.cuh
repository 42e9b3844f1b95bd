// The few machine operations that kernels are written over. With MLORA_EMULATE a host compiler takes the same
// kernels, and emulator.h of the tests provides these operations.
#pragma once

#include "cuda/kernels.h"
#include "cuda/numbers.h"

#ifdef MLORA_EMULATE
#include "emulator.h"
#else

namespace mlora::cuda {

__device__ inline int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ inline int block_x() { return static_cast<int>(blockIdx.x); }
__device__ inline int block_y() { return static_cast<int>(blockIdx.y); }
__device__ inline int block_z() { return static_cast<int>(blockIdx.z); }
__device__ inline int grid_y() { return static_cast<int>(gridDim.y); }

__device__ inline void synchronize() { __syncthreads(); }
__device__ inline void synchronize_warp() { __syncwarp(); }

__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  return shared_bytes;
}

// Where something lies in shared memory, in bytes.
__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Copies 16 bytes, or clears them and reads nothing; complete only after wait_copies.
__device__ inline void copy_async(void* shared, const void* global, bool present) {
  asm volatile(
      "{ .reg .pred ignore; setp.eq.u32 ignore, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, ignore; }" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(static_cast<uint32_t>(present))
      : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most kPending of the latest groups are under way.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
template <bool kTranspose>
__device__ inline void load_matrices(uint32_t (&out)[4], uint32_t address) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  }
}

// sum [16, 8] += a [16, 16] b [16, 8]
__device__ inline void multiply(BFloat16, float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply(Half, float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The value of the lane whose number differs in `bit`.
__device__ inline uint32_t exchange(uint32_t value, int bit) {
  return __shfl_xor_sync(0xffffffffu, value, bit);
}

// Bits 15 and 31 spread over the low and the high half.
__device__ inline uint32_t pair_mask(uint32_t value) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(value));
  return mask;
}

// Two numbers rounded to T, the first in the low half.
__device__ inline uint32_t pack(BFloat16, float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline uint32_t pack(Half, float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// How many programs were here before; their writes are seen after it, and this block's by who comes later.
__device__ inline int take_ticket(int* ticket) {
  __threadfence();
  const int before = atomicAdd(ticket, 1);
  __threadfence();
  return before;
}

// Global memory, which the tests' emulator counts.
template <typename T>
__device__ inline T read(const T* place) {
  return *place;
}
template <typename T>
__device__ inline void write(T* place, const T& value) {
  *place = value;
}

// What another program of this launch wrote: not from this multiprocessor's own cache.
__device__ inline float load_shared_sum(const float* place) { return __ldcg(place); }
__device__ inline Chunk<float> load_shared_sums(const float* place) {
  const float4 four = __ldcg(reinterpret_cast<const float4*>(place));
  return {{four.x, four.y, four.z, four.w}};
}

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
__device__ inline float to_float(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

__device__ inline void from_float(float value, float& out) { out = value; }
__device__ inline void from_float(float value, BFloat16& out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ inline void from_float(float value, Half& out) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}

struct Grid {
  int64_t x = 1;
  int64_t y = 1;
  int64_t z = 1;
  int cluster = 1;  // neighbours along x that run together (sm_90)
};

// Shared memory that a block may have; 48 KiB if the device does not tell.
inline int most_shared_bytes(const Queue& queue) {
  int bytes = 48 * 1024;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, queue.device);
  return bytes;
}

inline int multiprocessors(const Queue& queue) {
  int count = 1;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, queue.device);
  return count;
}

// Launches on the queue's device; an empty grid launches nothing.
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), const Grid& grid, int threads, int shared_bytes, const Queue& queue,
           const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
    return cudaSuccess;
  }
  if (grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) {
    return cudaErrorInvalidConfiguration;
  }
  int before = queue.device;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess && before != queue.device) {
    error = cudaSetDevice(queue.device);
  }
  if (error == cudaSuccess && shared_bytes > 48 * 1024) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim =
        dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = static_cast<cudaStream_t>(queue.stream);
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
    config.attrs = &cluster;
    config.numAttrs = grid.cluster > 1 ? 1 : 0;
    error = cudaLaunchKernelEx(&config, kernel, arguments...);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // reported here, not once more by whoever asks next
  }
  if (before != queue.device) {
    cudaSetDevice(before);
  }
  return error;
}

}  // namespace mlora::cuda
#endif
