// 16-bit storage types of the kernels; conversions are primitives.
#pragma once

#include <cstdint>

#include "params.h"

namespace mlora::cuda {

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

// Sixteen bytes that are copied at once.
struct alignas(16) Bytes16 {
  uint32_t word[4];
};

template <typename T>
struct alignas(16) Chunk {
  static constexpr int kCount = 16 / sizeof(T);
  T value[kCount];
};

}  // namespace mlora::cuda
