// Memory for the tickets of `tickets.cuh`, kept for each stream.
#pragma once

#include "cuda/device_tensors.h"

namespace mlora::cuda {

// At least `count` tickets that are 0 on the device of `like`, to be held until the launches are queued.
// Launches of one queue may share them, since each leaves them at 0. A captured graph has its own: it may run
// on any stream.
Tensor tickets_of(const Queue& queue, const Tensor& like, int64_t count);

}  // namespace mlora::cuda
