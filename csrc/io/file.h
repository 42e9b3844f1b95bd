// Files that are read and written in aligned pieces, past the page cache where the file system allows it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace mlora::io {

constexpr int64_t kAlign = 4096;  // of offsets, addresses and sizes
constexpr int64_t kPiece =
    4 << 20;  // bytes of one system call; consecutive pieces go to a file's parts in turn

// A system call that failed; becomes Python's OSError. `what` has no path.
struct IoError : std::runtime_error {
  IoError(int code, const std::string& path, const std::string& message);
  int code;
  std::string path;
};

// One file, or a scratch file striped over several folders.
class File {
 public:
  // Opens a file for reading. `direct`: past the page cache, if the file system allows it. A read is an error
  // if anybody has written the file since.
  static std::shared_ptr<File> open(const std::string& path, bool direct);
  // Opens a file for reading and writing; it is made if it is not there.
  static std::shared_ptr<File> create(const std::string& path, bool direct);
  // Makes a file without a name, with a part in each folder, for so many bytes. The kernel frees it when the
  // process ends, however it ends. A disk that lacks the room is an error now.
  static std::shared_ptr<File> scratch(const std::vector<std::string>& folders, int64_t bytes, bool direct);

  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  // Reads `bytes` at `offset`, of which at least `needed` must be there: a file may end in the last aligned
  // piece. Both calls stay inside of one piece. Offset, address and bytes are multiples of kAlign if direct.
  void read(int64_t offset, char* to, int64_t bytes, int64_t needed) const;
  void write(int64_t offset, const char* from, int64_t bytes) const;
  // Waits until what was written is on the disk.
  void sync() const;

  int64_t size() const;
  bool direct() const;  // whether no part has refused it so far
  const std::string& path() const { return parts_.front().path; }

 private:
  struct Part {
    int descriptor;
    std::string path;
    int64_t written_at = 0;  // nanoseconds; of a file that is only read, and nobody may write meanwhile
  };

  File(std::vector<Part> parts, bool direct) : parts_(std::move(parts)), direct_(direct) {}
  static Part open_part(const std::string& path, int flags, bool& direct);
  const Part& part_of(int64_t offset, int64_t& inside) const;
  void buffer_from_now_on(const Part& part) const;
  static int64_t written_at(const Part& part);

  std::vector<Part> parts_;
  mutable std::atomic<bool> direct_;
};

}  // namespace mlora::io
