#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace mlora::io {
namespace {

std::string at(const char* doing, int64_t bytes, int64_t offset) {
  return std::string(doing) + " " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset);
}

}  // namespace

IoError::IoError(int code, const std::string& path, const std::string& message)
    : std::runtime_error(message + ": " + std::strerror(code)), code(code), path(path) {}

// Opens without O_DIRECT where the file system refuses it.
File::Part File::open_part(const std::string& path, int flags, bool& direct) {
  int descriptor = ::open(path.c_str(), flags | O_CLOEXEC | (direct ? O_DIRECT : 0), 0600);
  if (descriptor < 0 && errno == EINVAL && direct) {
    direct = false;
    descriptor = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
  }
  if (descriptor < 0) {
    throw IoError(errno, path, "cannot be opened");
  }
  return {descriptor, path};
}

std::shared_ptr<File> File::open(const std::string& path, bool direct) {
  std::shared_ptr<File> file(new File({open_part(path, O_RDONLY, direct)}, direct));
  file->parts_.front().written_at = written_at(file->parts_.front());
  return file;
}

std::shared_ptr<File> File::create(const std::string& path, bool direct) {
  const Part part = open_part(path, O_RDWR | O_CREAT, direct);
  return std::shared_ptr<File>(new File({part}, direct));
}

std::shared_ptr<File> File::scratch(const std::vector<std::string>& folders, int64_t bytes, bool direct) {
  if (folders.empty()) {
    throw std::invalid_argument("folders: expected at least one");
  }
  std::shared_ptr<File> file(new File({}, direct));
  const int64_t parts = static_cast<int64_t>(folders.size());
  const int64_t pieces = (bytes + kPiece - 1) / kPiece;
  const int64_t each = (pieces + parts - 1) / parts * kPiece;
  for (const std::string& folder : folders) {
    file->parts_.push_back(open_part(folder, O_TMPFILE | O_RDWR, direct));
    const int code = each == 0 ? 0 : ::posix_fallocate(file->parts_.back().descriptor, 0, each);
    if (code != 0) {
      throw IoError(code, folder, "no scratch file of " + std::to_string(each) + " bytes can be made there");
    }
  }
  file->direct_ = direct;
  return file;
}

File::~File() {
  for (const Part& part : parts_) {
    ::close(part.descriptor);
  }
}

const File::Part& File::part_of(int64_t offset, int64_t& inside) const {
  const int64_t parts = static_cast<int64_t>(parts_.size());
  const int64_t piece = offset / kPiece;
  inside = piece / parts * kPiece + offset % kPiece;
  return parts_[static_cast<size_t>(piece % parts)];
}

// Returns when a file was last written.
int64_t File::written_at(const Part& part) {
  struct stat status;
  if (::fstat(part.descriptor, &status) != 0) {
    throw IoError(errno, part.path, "its time of change cannot be read");
  }
  return status.st_mtim.tv_sec * int64_t{1000000000} + status.st_mtim.tv_nsec;
}

// Some file systems accept O_DIRECT and refuse it at the first read or write, of several threads at once.
void File::buffer_from_now_on(const Part& part) const {
  const int flags = ::fcntl(part.descriptor, F_GETFL);
  if (flags >= 0 && (flags & O_DIRECT)) {
    direct_ = false;
    ::fcntl(part.descriptor, F_SETFL, flags & ~O_DIRECT);
  }
}

void File::read(int64_t offset, char* to, int64_t bytes, int64_t needed) const {
  int64_t inside = 0;
  const Part& part = part_of(offset, inside);
  int64_t done = 0;
  bool retried = false;
  while (done < bytes) {
    const ssize_t count =
        ::pread(part.descriptor, to + done, static_cast<size_t>(bytes - done), inside + done);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0 && errno == EINVAL && !retried) {
      retried = true;
      buffer_from_now_on(part);
      continue;
    }
    if (count < 0) {
      throw IoError(errno, part.path, at("reading", bytes - done, inside + done) + " failed");
    }
    done += count;
    const bool ended = count == 0 || (direct_ && done % kAlign != 0);
    if (ended && done < needed) {
      throw IoError(EIO, part.path,
                    at("reading", needed, inside) + " ended after " + std::to_string(done) +
                        "; the file was truncated or replaced");
    }
    if (ended) {
      break;
    }
  }
  if (part.written_at != 0 && written_at(part) != part.written_at) {
    throw IoError(EIO, part.path,
                  at("reading", needed, inside) + ": the file was written since it was opened");
  }
  if (!direct_) {
    ::posix_fadvise(part.descriptor, inside, bytes, POSIX_FADV_DONTNEED);
  }
}

void File::write(int64_t offset, const char* from, int64_t bytes) const {
  int64_t inside = 0;
  const Part& part = part_of(offset, inside);
  int64_t done = 0;
  bool retried = false;
  while (done < bytes) {
    const ssize_t count =
        ::pwrite(part.descriptor, from + done, static_cast<size_t>(bytes - done), inside + done);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0 && errno == EINVAL && !retried) {
      retried = true;
      buffer_from_now_on(part);
      continue;
    }
    if (count <= 0) {
      throw IoError(count < 0 ? errno : EIO, part.path,
                    at("writing", bytes - done, inside + done) + " failed");
    }
    done += count;
  }
}

void File::sync() const {
  for (const Part& part : parts_) {
    if (::fdatasync(part.descriptor) != 0) {
      throw IoError(errno, part.path, "cannot be brought to the disk");
    }
  }
}

int64_t File::size() const {
  int64_t bytes = 0;
  for (const Part& part : parts_) {
    struct stat status;
    if (::fstat(part.descriptor, &status) != 0) {
      throw IoError(errno, part.path, "its size cannot be read");
    }
    bytes += status.st_size;
  }
  return bytes;
}

bool File::direct() const { return direct_; }

}  // namespace mlora::io
