#pragma once
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace sidestream::cli {

/// Declares the arguments of `sidestream report` on `command`; parsing fills `files`, which must outlive it.
void declare_report_options(CLI::App& command, std::vector<std::string>& files);

/// `sidestream report`: the reports of several ranks as one table on stdout. Returns the exit code.
/// Throws: UsageError for a file that cannot be read, and as `parse_rank_report` and `table_of_ranks`.
[[nodiscard]] int report(const std::vector<std::string>& files);

}  // namespace sidestream::cli
