#include "tools/cli/check_command.h"

#include <cstdio>
#include <vector>

#include <fmt/format.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "sidestream/error.h"
#include "sidestream/journal.h"
#include "tools/cli/counted.h"
#include "tools/cli/schedule_command.h"
#include "tools/cli/train_command.h"

namespace sidestream::cli {
namespace {

Journal journal_of(const std::filesystem::path& path) {
  try {
    return read_journal(path.string());
  } catch (const UsageError& error) {
    throw UsageError(std::string(error.what()) +
                     " (sidestream train --check-steps 10 --journal FILE writes a journal)");
  }
}

int check_journal(const std::filesystem::path& path) {
  const Journal journal = journal_of(path);
  const std::vector<std::string> findings = check_order(journal);
  for (const std::string& finding : findings) {
    std::fputs(fmt::format("not ordered: {}\n", finding).c_str(), stdout);
  }
  std::fputs(fmt::format("{} operations on {} streams, {} accesses: {}\n", journal.operations.size(),
                         journal.streams.size(), journal.accesses.size(),
                         findings.empty() ? std::string("all conflicting accesses are ordered")
                                          : counted(static_cast<std::int64_t>(findings.size()), "finding"))
                 .c_str(),
             stdout);
  return findings.empty() ? kSuccess : kFailure;
}

}  // namespace

CheckOptions::CheckOptions() {
  training.device = "sim";
  training.shape = {.layers = 4, .hidden = 32, .heads = 2, .kv_heads = 1, .ffn = 64, .seq = 32};
  training.batch = 2;
  training.steps = 2;
}

void declare_check_options(CLI::App& command, CheckOptions& options) {
  declare_model_options(command, options.training);
  command.add_option("journal", options.journal, "A journal file, written by sidestream train --journal FILE")
      ->type_name("FILE");
  command
      .add_option("--schedules", options.schedules,
                  "Run recorded steps under N schedules and compare the bytes of the results")
      ->type_name("N");
  command.add_option("--schedule", options.schedule, "Run recorded steps under this one schedule")->type_name("NAME");
  command.get_option("--steps")->description("Steps to record, after two steps for sizing and capture");
}

int check(const CheckOptions& options) {
  const bool schedules = options.schedules.has_value() || !options.schedule.empty();
  if (options.journal.empty() != schedules) {
    throw UsageError(options.journal.empty()
                         ? "nothing to check: name a journal (sidestream train --check-steps 10 --journal FILE writes "
                           "one), or use --schedules N to run recorded steps in N orders"
                         : "a journal and schedules cannot be combined, because a journal holds no data to run again; "
                           "give one of them");
  }
  return schedules ? check_schedules(options) : check_journal(options.journal);
}

}  // namespace sidestream::cli
