#include "tools/cli/report_command.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include <sys/stat.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "sidestream/error.h"
#include "tools/cli/rank_reports.h"
#include "tools/cli/standard_output.h"

namespace sidestream::cli {
namespace {

std::string content_of(const std::string& file) {
  errno = 0;
  const std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();  // fails for an empty file too
  if (!in.is_open() || (text.fail() && errno != 0)) {
    throw UsageError("cannot read " + file + ": " + std::strerror(errno));
  }
  return text.str();
}

}  // namespace

void declare_report_options(CLI::App& command, std::vector<std::string>& files) {
  command.add_option("FILE", files, "Reports that ranks wrote with Report::json, in the order in which to show them")
      ->required();
}

int report(const std::vector<std::string>& files) {
  std::vector<RankReport> ranks;
  std::map<std::pair<dev_t, ino_t>, std::string> given;
  for (const std::string& file : files) {
    ranks.push_back(parse_rank_report(content_of(file), file));
    struct stat of_file = {};
    if (stat(file.c_str(), &of_file) != 0 || !S_ISREG(of_file.st_mode)) {
      continue;  // a pipe: it cannot be read twice
    }
    const auto [first, is_new] = given.emplace(std::pair(of_file.st_dev, of_file.st_ino), file);
    if (!is_new && first->second != file) {
      throw UsageError(file + " and " + first->second + " are the same file; give each rank's report once");
    }
  }
  print(table_of_ranks(ranks));
  return 0;
}

}  // namespace sidestream::cli
