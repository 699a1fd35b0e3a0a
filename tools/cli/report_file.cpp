#include "tools/cli/report_file.h"

#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sidestream/error.h"
#include "tools/cli/interrupt.h"

namespace sidestream::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kMostLinks = 40;  // as the kernel follows

[[noreturn]] void fail(int error) { throw std::system_error(error, std::generic_category()); }

/// Signals that a write may raise are errors of that write instead: a pipe that its reader closed, a file size limit.
class WriteErrors {
 public:
  WriteErrors() : pipe_(std::signal(SIGPIPE, SIG_IGN)), size_(std::signal(SIGXFSZ, SIG_IGN)) {}
  WriteErrors(const WriteErrors&) = delete;
  WriteErrors& operator=(const WriteErrors&) = delete;
  ~WriteErrors() {
    std::signal(SIGPIPE, pipe_);
    std::signal(SIGXFSZ, size_);
  }

 private:
  void (*pipe_)(int);
  void (*size_)(int);
};

void write_all(int descriptor, std::string_view text) {
  const WriteErrors errors;
  while (!text.empty()) {
    const ssize_t written = write(descriptor, text.data(), text.size());
    if (written < 0 && errno != EINTR) {
      fail(errno);
    }
    text.remove_prefix(written < 0 ? 0 : static_cast<std::size_t>(written));
  }
}

/// Where `path` leads when its last component is a link, whether or not there is something.
fs::path followed(fs::path path) {
  for (int links = 0; links < kMostLinks; ++links) {
    char target[PATH_MAX];
    const ssize_t length = readlink(path.c_str(), target, sizeof target);
    if (length < 0) {
      return path;
    }
    const fs::path next(std::string(target, static_cast<std::size_t>(length)));
    path = next.is_absolute() ? next : path.parent_path() / next;
  }
  fail(ELOOP);
}

/// The place that `path` leads to, without symbolic links. `path` itself if there is none: ReportFile refuses it.
/// Not std::filesystem::weakly_canonical: LibTorch exports its own copy of it, which wins at link time.
fs::path place_of(const fs::path& path) {
  try {
    const fs::path target = followed(path);
    const std::string folder = target.has_parent_path() ? target.parent_path().string() : ".";
    const std::unique_ptr<char, void (*)(void*)> real(realpath(folder.c_str(), nullptr), std::free);
    return real ? fs::path(real.get()) / target.filename() : path;
  } catch (const std::system_error&) {
    return path;
  }
}

bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

bool is_open_as(const struct stat& file, int descriptor) {
  struct stat other {};
  return fstat(descriptor, &other) == 0 && same_file(file, other);
}

/// A new file beside `target`, gone again unless it was renamed.
class PartialFile {
 public:
  explicit PartialFile(const fs::path& target)
      : path_(fmt::format("{}.{}-{:x}.partial", target.string(), getpid(),
                          std::chrono::steady_clock::now().time_since_epoch().count())),
        removed_(path_.c_str()),
        descriptor_(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
    if (descriptor_ < 0) {
      fail(errno);
    }
  }
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;
  ~PartialFile() {
    close(descriptor_);
    unlink(path_.c_str());
  }
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  [[nodiscard]] const char* path() const noexcept { return path_.c_str(); }

 private:
  std::string path_;
  RemovedBySignal removed_;
  int descriptor_;
};

}  // namespace

ReportFile::ReportFile(fs::path path, std::string option) : path_(std::move(path)), option_(std::move(option)) {
  const auto refuse = [&](const std::string& reason) {
    throw UsageError(fmt::format("{} '{}' {}", option_, path_.string(), reason));
  };
  try {
    struct stat status {};
    const bool exists = stat(path_.c_str(), &status) == 0;
    if (!exists && errno != ENOENT) {
      fail(errno);
    }
    if (exists && S_ISDIR(status.st_mode)) {
      refuse("is a folder; name a file in it");
    }
    if (exists && (S_ISBLK(status.st_mode) || S_ISSOCK(status.st_mode))) {
      refuse("is a disk or a socket; name a file");
    }
    if (exists && !S_ISREG(status.st_mode)) {
      open_stream();
      return;
    }
    if (exists && (is_open_as(status, STDOUT_FILENO) || is_open_as(status, STDERR_FILENO))) {
      refuse("is where this program's own output goes; name another file");
    }
    target_ = followed(path_);
    struct stat found {};
    if (exists && (lstat(target_.c_str(), &found) != 0 || !same_file(status, found))) {
      refuse("is a symbolic link that cannot be followed; name the file itself");
    }
    try_target();
  } catch (const std::system_error& error) {
    refuse(error.code().value() == ENXIO ? "is a pipe without a reader"
                                         : "cannot be written: " + error.code().message());
  }
}

ReportFile::~ReportFile() {
  if (stream_ >= 0) {
    close(stream_);
  }
}

void ReportFile::open_stream() {
  // Without O_NONBLOCK a pipe's open would wait for a reader.
  stream_ = open(path_.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (stream_ < 0) {
    fail(errno);
  }
  fcntl(stream_, F_SETFL, O_WRONLY);
}

void ReportFile::try_target() const {
  if (access(target_.c_str(), F_OK) == 0 && access(target_.c_str(), W_OK) != 0) {
    fail(errno);
  }
  const PartialFile tried(target_);
}

void ReportFile::commit(std::string_view text) {
  try {
    if (stream_ >= 0) {
      write_all(stream_, text);
    } else {
      replace_target(text);
    }
  } catch (const std::system_error& error) {
    throw Error(fmt::format("{} '{}' cannot be written: {}", option_, path_.string(), error.code().message()));
  }
}

void ReportFile::replace_target(std::string_view text) const {
  const PartialFile partial(target_);
  struct stat old {};
  if (lstat(target_.c_str(), &old) == 0) {
    if (!S_ISREG(old.st_mode)) {
      fail(EEXIST);  // since it was tried
    }
    if (fchmod(partial.descriptor(), old.st_mode & 0777) != 0) {
      fail(errno);
    }
  }
  write_all(partial.descriptor(), text);
  if (fsync(partial.descriptor()) != 0 || rename(partial.path(), target_.c_str()) != 0) {
    fail(errno);
  }
}

void require_own_files(const std::vector<NamedFile>& files) {
  for (auto file = files.begin(); file != files.end(); ++file) {
    for (auto other = file + 1; other != files.end(); ++other) {
      if (!file->path.empty() && !other->path.empty() && place_of(file->path) == place_of(other->path)) {
        throw UsageError(fmt::format("{} and {} are both '{}'; give each its own file", file->option, other->option,
                                     file->path.string()));
      }
    }
  }
}

}  // namespace sidestream::cli
