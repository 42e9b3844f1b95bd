// Marks functions that the kernels share with a plain host compiler.
#pragma once

#ifdef __CUDACC__
#define MLORA_HD __host__ __device__ inline
#else
#define MLORA_HD inline
#endif
