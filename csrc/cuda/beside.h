// A second stream, for launches that run beside those of the first.
#pragma once

#include "cuda/kernels.h"

namespace mlora::cuda {

// `other` becomes the queue's second stream, which waits for all that the queue holds now. Returns a CUDA
// error code.
int begin_beside(const Queue& queue, Queue& other);

// From now on the queue waits for all that `other` holds.
int end_beside(const Queue& queue, const Queue& other);

}  // namespace mlora::cuda
