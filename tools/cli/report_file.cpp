#include "tools/cli/report_file.h"

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "sidestream/error.h"

namespace sidestream::cli {

ReportFile::ReportFile(std::filesystem::path path, std::string option)
    : path_(std::move(path)),
      option_(std::move(option)),
      temporary_(path_.string() + fmt::format(".{}.partial", getpid())) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path_, ignored)) {
    throw UsageError(fmt::format("{} '{}' is a folder; name a file in it", option_, path_.string()));
  }
  descriptor_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) {
    throw UsageError(fmt::format("{} '{}' cannot be written: {}", option_, path_.string(), std::strerror(errno)));
  }
}

ReportFile::~ReportFile() {
  if (descriptor_ >= 0) {
    close(descriptor_);
    unlink(temporary_.c_str());
  }
}

void ReportFile::commit(std::string_view text) {
  const auto failed = [&] {
    throw Error(fmt::format("{} '{}' cannot be written: {}", option_, path_.string(), std::strerror(errno)));
  };
  while (!text.empty()) {
    const ssize_t written = write(descriptor_, text.data(), text.size());
    if (written < 0 && errno != EINTR) {
      failed();
    }
    text.remove_prefix(written < 0 ? 0 : static_cast<std::size_t>(written));
  }
  if (fsync(descriptor_) != 0 || rename(temporary_.c_str(), path_.c_str()) != 0) {
    failed();
  }
  close(std::exchange(descriptor_, -1));
}

}  // namespace sidestream::cli
