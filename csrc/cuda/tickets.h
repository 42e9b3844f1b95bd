// Memory for the tickets of `tickets.cuh`, kept for each stream.
#pragma once

#include "cuda/device_tensors.h"

namespace mlora::cuda {

// At least `count` tickets that are 0 on the device of `like`, to be held until the launches are queued.
// Launches of one queue may share them, since each leaves them at 0. A captured graph has its own: it may run
// on any stream.
Tensor tickets_of(const Queue& queue, const Tensor& like, int64_t count);

// Raises an error if a launch failed. Programs may then have taken tickets that nobody puts back, so the next
// call gets new ones.
void check_launch(const Queue& queue, int error, const char* kernel);

}  // namespace mlora::cuda
