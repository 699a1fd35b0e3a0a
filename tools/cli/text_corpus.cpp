#include "tools/cli/text_corpus.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include "sidestream/error.h"

namespace sidestream::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLicenceFolder = "/usr/share/common-licenses";
constexpr const char* kRemedy = "--text FILE... takes any text";

std::vector<std::uint8_t> read_bytes(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_directory(status)) {
    throw UsageError(fmt::format("text '{}' is a folder; name the files in it", path.string()));
  }
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    throw UsageError(fmt::format("text '{}' cannot be read: {}", path.string(), std::strerror(errno)));
  }
  std::vector<std::uint8_t> bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (in.bad()) {
    throw UsageError(fmt::format("text '{}' cannot be read to its end: {}", path.string(), std::strerror(errno)));
  }
  if (bytes.empty()) {
    throw UsageError(fmt::format("text '{}' is empty; {}", path.string(), kRemedy));
  }
  return bytes;
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

TextCorpus TextCorpus::read(const std::vector<fs::path>& files, std::string source) {
  if (files.empty()) {
    throw UsageError(fmt::format("no text to train on; {}", kRemedy));
  }
  TextCorpus corpus;
  for (const fs::path& file : files) {
    const std::vector<std::uint8_t> bytes = read_bytes(file);
    corpus.bytes_.insert(corpus.bytes_.end(), bytes.begin(), bytes.end());
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
  throw UsageError(
      fmt::format("no text: {} has no files and LibTorch came without its licence text; {}", kLicenceFolder, kRemedy));
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
                  "give more --text, or a "
                  "smaller --seq or --batch",
                  bytes_.size(), batch, window, needed));
}

}  // namespace sidestream::cli
