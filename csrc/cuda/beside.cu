#include <map>
#include <mutex>
#include <utility>

#include "cuda/beside.h"
#include "cuda/primitives.cuh"

namespace mlora::cuda {

#ifdef MLORA_EMULATE

int begin_beside(const Queue& queue, Queue& other) {
  other = queue;
  return 0;
}
int end_beside(const Queue&, const Queue&) { return 0; }

#else
namespace {

// Kept for the process, as streams are.
struct Second {
  cudaStream_t stream = nullptr;
  cudaEvent_t begun = nullptr;
  cudaEvent_t ended = nullptr;
};

int make(Second& second, int device) {
  int before = device;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess) {
    error = cudaSetDevice(device);
  }
  if (error == cudaSuccess) {
    error = cudaStreamCreateWithFlags(&second.stream, cudaStreamNonBlocking);
  }
  for (cudaEvent_t* event : {&second.begun, &second.ended}) {
    if (error == cudaSuccess) {
      error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
    }
  }
  cudaSetDevice(before);
  return error;
}

std::mutex mutex;
std::map<std::pair<int, void*>, Second> seconds;

}  // namespace

int begin_beside(const Queue& queue, Queue& other) {
  const std::lock_guard lock(mutex);
  Second& second = seconds[{queue.device, queue.stream}];
  int error = second.ended == nullptr ? make(second, queue.device) : cudaSuccess;
  if (error == cudaSuccess) {
    error = cudaEventRecord(second.begun, static_cast<cudaStream_t>(queue.stream));
  }
  other = {second.stream, queue.device};
  return error == cudaSuccess ? cudaStreamWaitEvent(second.stream, second.begun) : error;
}

int end_beside(const Queue& queue, const Queue& other) {
  const std::lock_guard lock(mutex);
  const Second& second = seconds[{queue.device, queue.stream}];
  const int error = cudaEventRecord(second.ended, static_cast<cudaStream_t>(other.stream));
  return error == cudaSuccess ? cudaStreamWaitEvent(static_cast<cudaStream_t>(queue.stream), second.ended)
                              : error;
}
#endif

}  // namespace mlora::cuda
