// Partial sums of several programs, added up by the last of them: no launch of its own, and in a fixed order.
#pragma once

#include "cuda/primitives.cuh"

namespace mlora::cuda {

// Whether this program is the last of `programs` that take a ticket here; it then sees what the others wrote
// before. Shared memory is overwritten.
__device__ inline bool is_last(int* ticket, int programs) {
  int* last = reinterpret_cast<int*>(shared_memory());
  synchronize();
  if (thread_index() == 0) {
    *last = take_ticket(ticket) == programs - 1 ? 1 : 0;
    if (*last != 0) {
      *ticket = 0;
    }
  }
  synchronize();
  return *last != 0;
}

}  // namespace mlora::cuda
