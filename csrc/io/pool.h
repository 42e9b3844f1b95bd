// Threads that read and write pieces of files while others compute.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "io/file.h"

namespace mlora::io {

// A read or write under way. Its pieces are done in any order.
class Transfer {
 public:
  // Waits for all pieces; throws the first error.
  void wait();
  bool done() const;
  // Seconds of CLOCK_MONOTONIC: when its first piece began and its last one ended; zeros before that.
  std::pair<double, double> span() const;

 private:
  friend class Pool;
  void finish(double begin, double end, std::exception_ptr error);

  mutable std::mutex mutex_;
  std::condition_variable finished_;
  int64_t left_ = 0;
  double begin_ = 0;
  double end_ = 0;
  std::exception_ptr error_;
};

class Pool {
 public:
  // `rate`: bytes per second of all threads together, for a slower disk than there is; 0 = no bound.
  Pool(int threads, double rate);
  // Waits for everything under way.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Transfers begin in the order of the calls. The memory must stay where it is until `wait` has returned.
  // `bytes` is rounded up to a multiple of kAlign for a direct file: the memory must have room for that.
  std::shared_ptr<Transfer> read(std::shared_ptr<File> file, int64_t offset, char* to, int64_t bytes);
  std::shared_ptr<Transfer> write(std::shared_ptr<File> file, int64_t offset, char* from, int64_t bytes);

  // Processor seconds that the threads have used.
  double cpu_seconds() const;

 private:
  struct Piece {
    std::shared_ptr<File> file;
    std::shared_ptr<Transfer> transfer;
    int64_t offset;
    char* memory;
    int64_t bytes;
    int64_t needed;
    bool writes;
  };

  std::shared_ptr<Transfer> begin(std::shared_ptr<File> file, int64_t offset, char* memory, int64_t bytes,
                                  bool writes);
  void work();
  void keep_to_rate(int64_t bytes);

  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<Piece> pieces_;
  bool ends_ = false;
  const double rate_;
  std::mutex rate_mutex_;
  double free_at_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace mlora::io
