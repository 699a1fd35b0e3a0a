#pragma once
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace sidestream::cli {

/// A place that the user named for results.
///
/// A file appears complete or not at all: written beside its place, synced, then renamed over it. A symbolic link stays: the
/// file that it leads to is replaced, or made. What is no file but takes bytes (a pipe, a terminal, /dev/null) is written into and
/// never replaced. Folders, disks and sockets are refused.
class ReportFile {
 public:
  /// Tries the place, so that an unwritable one is refused before the work is done; leaves nothing there.
  /// Throws: UsageError with the reason.
  /// `option` is how the user named it, for messages.
  ReportFile(std::filesystem::path path, std::string option);
  ReportFile(const ReportFile&) = delete;
  ReportFile& operator=(const ReportFile&) = delete;
  ~ReportFile();

  /// Writes `text`. Throws: Error with the reason; the old file, if any, is then unchanged and nothing is left beside it.
  void commit(std::string_view text);
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  void open_stream();
  void try_target() const;
  void replace_target(std::string_view text) const;

  std::filesystem::path path_;
  std::string option_;
  std::filesystem::path target_;  ///< the file that `path_` leads to; empty for what is written into
  int stream_ = -1;               ///< what is written into
};

/// A place for results, and the option that names it.
struct NamedFile {
  const char* option;
  std::filesystem::path path;  ///< empty: not given
};

/// Throws: UsageError if two of `files` lead to the same place, also by different paths or by symbolic links.
void require_own_files(const std::vector<NamedFile>& files);

}  // namespace sidestream::cli
