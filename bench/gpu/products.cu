// What bench/gpu/products.py calls through ctypes. Compiled with -I csrc by bench/gpu/kit.py; nothing of
// torch.
#include <cuda_runtime.h>

#include <cstdint>

#if __has_include("cuda/hopper_product.h")
#include "cuda/hopper_product.h"

// One product of bf16 rows without padding; `starts` null: the frozen product alone. Returns a CUDA error
// code.
extern "C" int mlora_product(bool forward, const void* rows, const void* weight, void* out,
                             int64_t rows_total, int d_in, int d_out, const int32_t* starts,
                             const void* parts, const void* s, int ranks, const void* page, int adapters,
                             int pitch, const void* factors, const float* p, const int64_t* rng,
                             const int64_t* layer, const uint32_t* keep, int cluster, int group, int left,
                             void* stream) {
  using namespace mlora;
  using namespace mlora::cuda;
  const int depth = forward ? d_in : d_out, columns = forward ? d_out : d_in;
  ProductArguments arguments = {};
  arguments.type = Scalar::kBFloat16;
  arguments.forward = forward;
  arguments.rows = {rows, depth, true};
  arguments.weight = {weight, d_in, true};
  arguments.out = {out, columns, true};
  arguments.parts = {starts, static_cast<const Tile*>(parts)};
  arguments.s = {s, ranks, true};
  arguments.factor = {{page, columns, true}, static_cast<const FactorRow*>(factors), adapters, pitch};
  arguments.dropout = {p, rng, layer};
  arguments.keep = keep;
  arguments.rows_total = rows_total;
  arguments.d_in = d_in;
  arguments.d_out = d_out;
  arguments.ranks = ranks;
  arguments.cluster = cluster;
  arguments.group = group;
  arguments.left = left;
  return launch_product(arguments, Queue{stream, 0});
}
#endif

namespace {

// Each thread has eight loads under way.
__global__ void __launch_bounds__(512, 1) read(const uint4* from, int64_t count, uint32_t* out) {
  uint32_t sum = 0;
  const int64_t step = int64_t{gridDim.x} * 512 * 8;
  for (int64_t at = int64_t{blockIdx.x} * 512 * 8 + threadIdx.x; at + 7 * 512 < count; at += step) {
    uint4 words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      words[i] = __ldcs(from + at + i * 512);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum ^= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
    }
  }
  if (sum == 0x9e3779b9u) {
    *out = sum;
  }
}

}  // namespace

// Reads `count` times 16 bytes, by one block on each of so many multiprocessors.
extern "C" int mlora_read(const void* from, int64_t count, uint32_t* out, int multiprocessors, void* stream) {
  read<<<multiprocessors, 512, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(from), count,
                                                                       out);
  return cudaGetLastError();
}
