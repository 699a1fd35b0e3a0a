#pragma once
#include <filesystem>
#include <string>
#include <string_view>

namespace sidestream::cli {

/// A file that appears complete or not at all: written beside its place, synced, then renamed over it.
class ReportFile {
 public:
  /// Opens the temporary file, so that an unwritable place is refused before the work is done.
  /// Throws: UsageError with the reason.
  /// `option` is how the user named it, for messages.
  ReportFile(std::filesystem::path path, std::string option);
  ReportFile(const ReportFile&) = delete;
  ReportFile& operator=(const ReportFile&) = delete;
  /// Removes the temporary file if nothing was committed.
  ~ReportFile();

  /// Writes `text` and puts the file in its place. Throws: Error with the reason; the old file, if any, is then unchanged.
  void commit(std::string_view text);
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
  std::string option_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

}  // namespace sidestream::cli
