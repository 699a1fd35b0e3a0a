#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace sidestream::cli {

/// The text that a run trains on: bytes, split into a part to train on and the last tenth, which is held out.
class TextCorpus {
 public:
  /// So many bytes are read at most, of all files together.
  static constexpr std::size_t kMostBytes = std::size_t{1} << 30;

  /// Reads `files` one after another, `most` bytes at most. `source` says in words where they come from.
  /// Throws: UsageError when a file cannot be read, is empty or no regular file, when there are more bytes than `most`, or no
  /// file is given.
  [[nodiscard]] static TextCorpus read(const std::vector<std::filesystem::path>& files, std::string source,
                                       std::size_t most = kMostBytes);
  /// The texts of /usr/share/common-licenses, else the licence text that comes with the LibTorch wheel.
  /// Throws: UsageError when there is neither; says that --text takes any file.
  [[nodiscard]] static TextCorpus read_default();

  [[nodiscard]] std::span<const std::uint8_t> train() const noexcept { return {bytes_.data(), train_bytes_}; }
  [[nodiscard]] std::span<const std::uint8_t> held_out() const noexcept {
    return {bytes_.data() + train_bytes_, bytes_.size() - train_bytes_};
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_.size(); }
  [[nodiscard]] std::size_t files() const noexcept { return files_; }
  [[nodiscard]] const std::string& source() const noexcept { return source_; }

  /// Nats per byte that a model pays which knows only how often each byte occurs in the whole text.
  [[nodiscard]] double byte_entropy() const;
  /// Throws: UsageError, naming the bytes needed, unless the training part holds `batch` windows of `window` bytes and the
  /// held-out part holds one.
  void require_windows(std::size_t window, std::size_t batch) const;

 private:
  std::vector<std::uint8_t> bytes_;
  std::size_t train_bytes_ = 0;
  std::size_t files_ = 0;
  std::string source_;
};

/// The regular files (not links) of `folder`, sorted by name; empty when it is no folder.
[[nodiscard]] std::vector<std::filesystem::path> regular_files(const std::filesystem::path& folder);

}  // namespace sidestream::cli
