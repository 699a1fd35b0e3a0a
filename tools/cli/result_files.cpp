#include "tools/cli/result_files.h"

#include <filesystem>
#include <utility>

#include <fmt/format.h>

#include "sidestream/error.h"
#include "tools/cli/standard_output.h"

namespace sidestream::cli {
namespace {

std::optional<ReportFile> place(const std::filesystem::path& path, const char* option) {
  return path.empty() ? std::optional<ReportFile>() : std::optional<ReportFile>(std::in_place, path, option);
}

}  // namespace

ResultFiles::ResultFiles(const TrainingOptions& options)
    : report_(place(options.report, "--report")),
      journal_(place(options.journal, "--journal")),
      trace_(place(options.trace, "--trace")) {}

void ResultFiles::write_journal(const std::string& text) { commit(journal_, text); }

bool ResultFiles::attempt(const std::function<void()>& action) {
  try {
    action();
    return true;
  } catch (const Error&) {
    unwritten_ = unwritten_ == nullptr ? std::current_exception() : unwritten_;
    return false;
  }
}

void ResultFiles::commit(std::optional<ReportFile>& file, const std::string& text) {
  if (file && !attempt([&] { file->commit(text); })) {
    file.reset();
  }
}

void ResultFiles::write(const TrainingResult& result) {
  commit(report_, result_json(result));
  if (trace_) {
    std::string trace;
    if (attempt([&] { trace = result_trace(result); }) && trace.empty()) {
      print("\n  no trace: the training was ended before a step was traced\n");
    }
    if (trace.empty()) {
      trace_.reset();
    }
    commit(trace_, trace);
  }
  const std::pair<const char*, const std::optional<ReportFile>&> files[] = {
      {"report", report_}, {"journal", journal_}, {"trace", trace_}};
  for (const auto& [name, file] : files) {
    if (file) {
      print(fmt::format("\n  {}: {}\n", name, file->path().string()));
    }
  }
  if (unwritten_ != nullptr) {
    std::rethrow_exception(unwritten_);
  }
}

}  // namespace sidestream::cli
