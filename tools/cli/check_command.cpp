#include "tools/cli/check_command.h"

#include <cstdio>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "sidestream/journal.h"
#include "tools/cli/train_command.h"

namespace sidestream::cli {

int check(const std::filesystem::path& path) {
  const Journal journal = read_journal(path.string());
  const std::vector<std::string> findings = check_order(journal);
  for (const std::string& finding : findings) {
    std::fputs(fmt::format("not ordered: {}\n", finding).c_str(), stdout);
  }
  std::fputs(fmt::format("{} operations on {} streams, {} accesses: {}\n", journal.operations.size(),
                         journal.streams.size(), journal.accesses.size(),
                         findings.empty() ? std::string("every two that conflict are ordered")
                                          : fmt::format("{} findings", findings.size()))
                 .c_str(),
             stdout);
  return findings.empty() ? kSuccess : kFailure;
}

}  // namespace sidestream::cli
