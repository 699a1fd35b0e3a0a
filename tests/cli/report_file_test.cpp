#include "tools/cli/report_file.h"

#include <gtest/gtest.h>

#include "sidestream/error.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

std::size_t entries(const std::filesystem::path& folder) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()));
}

TEST(ReportFile, AppearsCompleteOnCommit) {
  const ScratchFolder folder;
  const auto path = folder.write("report.json", "old");
  {
    ReportFile report(path, "--report");
    EXPECT_EQ(ScratchFolder::read(path), "old");
    report.commit("new and longer");
  }
  EXPECT_EQ(ScratchFolder::read(path), "new and longer");
  EXPECT_EQ(entries(folder.path()), 1u);
}

TEST(ReportFile, LeavesNothingWithoutCommit) {
  const ScratchFolder folder;
  { const ReportFile report(folder.path() / "report.json", "--report"); }
  EXPECT_EQ(entries(folder.path()), 0u);
}

TEST(ReportFile, RefusesPlacesThatCannotBeWritten) {
  const ScratchFolder folder;
  EXPECT_THROW(ReportFile(folder.path() / "absent" / "report.json", "--report"), UsageError);
  EXPECT_THROW(ReportFile(folder.path(), "--report"), UsageError);
  EXPECT_EQ(entries(folder.path()), 0u);
}

}  // namespace
}  // namespace sidestream::cli
