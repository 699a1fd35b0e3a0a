#include "tools/cli/text_corpus.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sidestream/error.h"

namespace sidestream::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLicenceFolder = "/usr/share/common-licenses";
constexpr std::size_t kReadBytes = std::size_t{1} << 20;
constexpr const char* kRemedy = "use --text FILE... with any text file";

/// A regular file, open for reading.
class TextFile {
 public:
  explicit TextFile(const fs::path& path)
      // Without O_NONBLOCK a pipe would wait here for a writer.
      : descriptor_(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    struct stat status {};
    if (descriptor_ < 0 || fstat(descriptor_, &status) != 0) {
      throw UsageError(fmt::format("text '{}' cannot be read: {}", path.string(), std::strerror(errno)));
    }
    if (!S_ISREG(status.st_mode)) {
      close(descriptor_);
      throw UsageError(S_ISDIR(status.st_mode)
                           ? fmt::format("text '{}' is a folder; name the files in it", path.string())
                           : fmt::format("text '{}' is a device or a pipe, which may never end; write its contents to "
                                         "a file and name that file",
                                         path.string()));
    }
    bytes_ = static_cast<std::size_t>(status.st_size);
  }
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;
  ~TextFile() { close(descriptor_); }

  /// What the file system says; a file may have more when it grows, or is one of /proc.
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] ssize_t read(std::span<std::uint8_t> buffer) const {
    ssize_t count = 0;
    do {
      count = ::read(descriptor_, buffer.data(), buffer.size());
    } while (count < 0 && errno == EINTR);
    return count;
  }

 private:
  int descriptor_;
  std::size_t bytes_ = 0;
};

/// Appends the file to `bytes`, which must stay within `most`.
void append(std::vector<std::uint8_t>& bytes, const fs::path& path, std::size_t most) {
  const TextFile file(path);
  const auto require_room = [&](std::size_t more) {
    if (more > most - bytes.size()) {
      throw UsageError(
          fmt::format("with '{}' the text has more than {} bytes, the most that can be read; use a part of it",
                      path.string(), most));
    }
  };
  require_room(file.bytes());
  const std::size_t before = bytes.size();
  bytes.reserve(before + file.bytes());
  std::vector<std::uint8_t> buffer(kReadBytes);
  for (ssize_t count = 0; (count = file.read(buffer)) != 0;) {
    if (count < 0) {
      throw UsageError(fmt::format("text '{}' cannot be read to its end: {}", path.string(), std::strerror(errno)));
    }
    require_room(static_cast<std::size_t>(count));
    bytes.insert(bytes.end(), buffer.begin(), buffer.begin() + count);
  }
  if (bytes.size() == before) {
    throw UsageError(fmt::format("text '{}' is empty; {}", path.string(), kRemedy));
  }
}

/// The wheel that the running LibTorch was loaded from keeps its licence in torch-VERSION.dist-info beside torch/lib.
std::optional<fs::path> wheel_licence() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(static_cast<void (*)(const c10::Warning&)>(&c10::warn)), &info) == 0) {
    return std::nullopt;
  }
  std::error_code error;
  const fs::path library = fs::canonical(info.dli_fname, error);
  const fs::path torch = library.parent_path().parent_path();
  std::vector<fs::path> candidates{torch / "LICENSE"};
  for (fs::directory_iterator entry(torch.parent_path(), error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with("torch-") && name.ends_with(".dist-info")) {
      candidates.push_back(entry->path() / "licenses" / "LICENSE");
      candidates.push_back(entry->path() / "LICENSE");
    }
  }
  const auto found = std::find_if(candidates.begin(), candidates.end(), [](const fs::path& path) {
    std::error_code ignored;
    return fs::is_regular_file(path, ignored);
  });
  return found == candidates.end() ? std::nullopt : std::optional(*found);
}

}  // namespace

std::vector<fs::path> regular_files(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    if (fs::is_regular_file(entry->symlink_status(ignored))) {
      files.push_back(entry->path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

TextCorpus TextCorpus::read(const std::vector<fs::path>& files, std::string source, std::size_t most) {
  if (files.empty()) {
    throw UsageError(fmt::format("no text to train on; {}", kRemedy));
  }
  TextCorpus corpus;
  for (const fs::path& file : files) {
    append(corpus.bytes_, file, most);
  }
  corpus.files_ = files.size();
  corpus.source_ = std::move(source);
  corpus.train_bytes_ = corpus.bytes_.size() - corpus.bytes_.size() / 10;
  return corpus;
}

TextCorpus TextCorpus::read_default() {
  if (const std::vector<fs::path> files = regular_files(kLicenceFolder); !files.empty()) {
    return read(files, kLicenceFolder);
  }
  if (const std::optional<fs::path> licence = wheel_licence()) {
    return read({*licence}, "the licence text of LibTorch");
  }
  throw UsageError(fmt::format("no text to train on: {} has no files, and this LibTorch has no licence text; {}",
                               kLicenceFolder, kRemedy));
}

double TextCorpus::byte_entropy() const {
  std::array<std::size_t, 256> counts{};
  for (const std::uint8_t byte : bytes_) {
    ++counts[byte];
  }
  double entropy = 0;
  for (const std::size_t count : counts) {
    if (count > 0) {
      const double p = static_cast<double>(count) / static_cast<double>(bytes_.size());
      entropy -= p * std::log(p);
    }
  }
  return entropy;
}

void TextCorpus::require_windows(std::size_t window, std::size_t batch) const {
  if (held_out().size() >= window && train().size() >= window * batch) {
    return;
  }
  const std::size_t needed = std::max(window * 10, (window * batch * 10 + 8) / 9);
  throw UsageError(
      fmt::format("the text has {} bytes; a batch of {} windows of {} bytes, with the last tenth held out, needs {}: "
                  "use more --text, or a smaller --seq or --batch",
                  bytes_.size(), batch, window, needed));
}

}  // namespace sidestream::cli
