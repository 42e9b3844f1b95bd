// What the driver and the current device can run, and whether a stream is being captured.
#include <sstream>

#include "cuda/kernels.h"
#include "cuda/primitives.cuh"

namespace mlora::cuda {

#ifdef MLORA_EMULATE
uint64_t capture_of(const Queue&) { return 0; }
#else
namespace {

__global__ void probe_kernel() {}

// Whether this library was compiled for the current device.
bool has_code() {
  cudaFuncAttributes attributes = {};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
  cudaGetLastError();
  return error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction;
}

}  // namespace

// CUDA counts versions as 1000 major + 10 minor. Newer minor versions of one major version need no newer
// driver.
std::string driver_refusal() {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) {
    return "";
  }
  if (driver / 1000 >= runtime / 1000) {
    return has_code() ? ""
                      : "this build has no code for this GPU; build it with MLORA_CUDA_ARCHITECTURES of it";
  }
  std::ostringstream reason;
  reason << "this build is of CUDA " << runtime / 1000 << ", the driver serves CUDA " << driver / 1000
         << " only; update it, or build with the nvcc of CUDA " << driver / 1000;
  return reason.str();
}

uint64_t capture_of(const Queue& queue) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(queue.stream), &status, &id);
  return error == cudaSuccess && status == cudaStreamCaptureStatusActive ? id : 0;
}
#endif

int shrink_parts(const Queue& queue, int64_t tiles, int columns) {
  // half of the multiprocessors can keep the memory busy
  return 2 * tiles >= multiprocessors(queue) ? 1 : ceil_div(columns, quarter_of(columns));
}

}  // namespace mlora::cuda
