#pragma once
#include <exception>
#include <functional>
#include <optional>
#include <string>

#include "tools/cli/report_file.h"
#include "tools/cli/training_options.h"
#include "tools/cli/training_result.h"

namespace sidestream::cli {

/// What training writes, in the places that the user named. A file that cannot be written keeps no other from being written.
class ResultFiles {
 public:
  /// Throws: as ReportFile.
  explicit ResultFiles(const TrainingOptions& options);

  [[nodiscard]] bool wants_journal() const noexcept { return journal_.has_value(); }
  void write_journal(const std::string& text);
  /// Does what writes something else. An Error waits until write(): the rest is still to be said and written. True: done.
  bool attempt(const std::function<void()>& action);
  /// Report and trace; prints where the files are that were written. Throws: Error, the first of all that went wrong.
  void write(const TrainingResult& result);

 private:
  /// Resets `file` if it cannot be written.
  void commit(std::optional<ReportFile>& file, const std::string& text);

  std::optional<ReportFile> report_;
  std::optional<ReportFile> journal_;
  std::optional<ReportFile> trace_;
  std::exception_ptr unwritten_;
};

}  // namespace sidestream::cli
