// Fetching rows ahead of their use.
#pragma once

#include <cstdint>

namespace mlora::cpu::MLORA_ISA {

inline void prefetch_line(const void* p) { __builtin_prefetch(p, 1, 3); }

template <typename T>
void prefetch_row(const T* row, int64_t cols) {
  for (int64_t c = 0; c < cols; c += 64 / static_cast<int64_t>(sizeof(T))) {
    prefetch_line(row + c);
  }
}

}  // namespace mlora::cpu::MLORA_ISA
