#include "cuda/tickets.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

namespace mlora::cuda {
namespace {

using Key = std::tuple<int, void*, uint64_t>;  // device, stream, capture
std::mutex mutex;
// never destroyed: when a process ends, the device may go first
auto& kept = *new std::map<Key, Tensor>;

}  // namespace

Tensor tickets_of(const Queue& queue, const Tensor& like, int64_t count) {
  constexpr int64_t kLeast = 16384;
  const std::lock_guard<std::mutex> lock(mutex);
  const Key key{queue.device, queue.stream, capture_of(queue)};
  // of captures that have ended: their graphs keep the memory, and clear it at each run
  std::erase_if(kept, [&](const auto& entry) {
    const auto& [device, stream, capture] = entry.first;
    return device == queue.device && stream == queue.stream && capture != 0 && capture != std::get<2>(key);
  });
  auto found = kept.find(key);
  if (found == kept.end() || found->second.numel() < count) {
    const int64_t size = std::max(count, kLeast);
    Tensor zeros = torch::stable::full({size}, 0.0, ScalarType::Int, std::nullopt, like.device());
    found = kept.insert_or_assign(key, zeros).first;
  }
  return found->second;
}

void check_launch(const Queue& queue, int error, const char* kernel) {
  if (error != 0) {
    const std::lock_guard<std::mutex> lock(mutex);
    kept.erase({queue.device, queue.stream, capture_of(queue)});
  }
  MLORA_CHECK(error == 0, kernel, ": CUDA error ", error);
}

}  // namespace mlora::cuda
