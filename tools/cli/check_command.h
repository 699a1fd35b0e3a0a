#pragma once
#include <filesystem>

namespace sidestream::cli {

/// `sidestream check FILE`: looks for unordered accesses in a journal, findings on stdout. Returns the exit code: kFailure where
/// there are any. Throws: UsageError for a file that is no whole journal.
[[nodiscard]] int check(const std::filesystem::path& journal);

}  // namespace sidestream::cli
