#include <string>
#include <string_view>

#include <fmt/format.h>

#include "fuzz/target.h"
#include "sidestream/error.h"
#include "tools/cli/rank_reports.h"

// Report files of two ranks: the input up to its first line's end, and the rest.

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::size_t line = text.find('\n');
  const std::string_view rest = line == std::string_view::npos ? std::string_view() : text.substr(line + 1);
  try {
    const auto first = sidestream::cli::parse_rank_report(text.substr(0, line), "rank0.json");
    auto again = first;
    again.file = "rank1.json";
    const std::string table = sidestream::cli::table_of_ranks({first, again});
    const std::string sum = fmt::format("{}", 2 * first.waits);
    sidestream::fuzz::require(table.find(sum, table.find("\n  all ")) != std::string::npos, "the last row has the sum");
    (void)sidestream::cli::table_of_ranks({first, sidestream::cli::parse_rank_report(rest, "rank1.json")});
  } catch (const sidestream::UsageError&) {
  }
  return 0;
}
