#include "io/pool.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace mlora::io {
namespace {

double seconds_of(clockid_t clock) {
  timespec time;
  return ::clock_gettime(clock, &time) == 0
             ? static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec)
             : 0.0;
}

}  // namespace

void Transfer::wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return left_ == 0; });
  if (error_) {
    std::rethrow_exception(error_);
  }
}

bool Transfer::done() const {
  const std::lock_guard lock(mutex_);
  return left_ == 0;
}

std::pair<double, double> Transfer::span() const {
  const std::lock_guard lock(mutex_);
  return {begin_, end_};
}

void Transfer::finish(double begin, double end, std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  begin_ = begin_ == 0 ? begin : std::min(begin_, begin);
  end_ = std::max(end_, end);
  error_ = error_ ? error_ : error;
  if (--left_ == 0) {
    finished_.notify_all();
  }
}

Pool::Pool(int threads, double rate) : rate_(rate) {
  if (threads < 1 || rate < 0) {
    throw std::invalid_argument("threads, rate: expected at least 1 and at least 0, got " +
                                std::to_string(threads) + " and " + std::to_string(rate));
  }
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { work(); });
  }
}

Pool::~Pool() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  came_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

std::shared_ptr<Transfer> Pool::read(std::shared_ptr<File> file, int64_t offset, char* to, int64_t bytes) {
  return begin(std::move(file), offset, to, bytes, false);
}

std::shared_ptr<Transfer> Pool::write(std::shared_ptr<File> file, int64_t offset, char* from, int64_t bytes) {
  return begin(std::move(file), offset, from, bytes, true);
}

std::shared_ptr<Transfer> Pool::begin(std::shared_ptr<File> file, int64_t offset, char* memory, int64_t bytes,
                                      bool writes) {
  if (offset % kAlign != 0 || reinterpret_cast<uintptr_t>(memory) % kAlign != 0 || bytes < 0) {
    throw std::invalid_argument("offset and address: expected multiples of " + std::to_string(kAlign) +
                                ", got " + std::to_string(offset) + " and " +
                                std::to_string(reinterpret_cast<uintptr_t>(memory)));
  }
  auto transfer = std::make_shared<Transfer>();
  std::vector<Piece> pieces;
  for (int64_t done = 0; done < bytes;) {
    const int64_t to_boundary = kPiece - (offset + done) % kPiece;
    const int64_t needed = std::min(bytes - done, to_boundary);
    const int64_t rounded = (needed + kAlign - 1) / kAlign * kAlign;
    pieces.push_back({file, transfer, offset + done, memory + done, rounded, needed, writes});
    done += needed;
  }
  transfer->left_ = static_cast<int64_t>(pieces.size());
  {
    const std::lock_guard lock(mutex_);
    std::move(pieces.begin(), pieces.end(), std::back_inserter(pieces_));
  }
  came_.notify_all();
  return transfer;
}

void Pool::work() {
  for (;;) {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [&] { return ends_ || !pieces_.empty(); });
    if (pieces_.empty()) {
      return;
    }
    const Piece piece = std::move(pieces_.front());
    pieces_.pop_front();
    lock.unlock();
    const double begin = seconds_of(CLOCK_MONOTONIC);
    std::exception_ptr error;
    try {
      keep_to_rate(piece.bytes);
      if (piece.writes) {
        piece.file->write(piece.offset, piece.memory, piece.bytes);
      } else {
        piece.file->read(piece.offset, piece.memory, piece.bytes, piece.needed);
      }
    } catch (...) {
      error = std::current_exception();
    }
    piece.transfer->finish(begin, seconds_of(CLOCK_MONOTONIC), error);
  }
}

// Sleeps until the bytes before these have passed at the bounded rate.
void Pool::keep_to_rate(int64_t bytes) {
  if (rate_ == 0) {
    return;
  }
  double until = 0;
  {
    const std::lock_guard lock(rate_mutex_);
    free_at_ = std::max(free_at_, seconds_of(CLOCK_MONOTONIC)) + static_cast<double>(bytes) / rate_;
    until = free_at_;
  }
  const double left = until - seconds_of(CLOCK_MONOTONIC);
  if (left > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(left));
  }
}

double Pool::cpu_seconds() const {
  double sum = 0;
  for (const std::thread& thread : threads_) {
    clockid_t clock;
    // native_handle is not const
    if (::pthread_getcpuclockid(const_cast<std::thread&>(thread).native_handle(), &clock) == 0) {
      sum += seconds_of(clock);
    }
  }
  return sum;
}

}  // namespace mlora::io
