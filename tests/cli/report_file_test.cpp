#include "tools/cli/report_file.h"

#include <cstdlib>
#include <set>
#include <string>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <unistd.h>

#include "sidestream/error.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

namespace fs = std::filesystem;

std::set<std::string> names(const fs::path& folder) {
  std::set<std::string> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    found.insert(entry.path().filename());
  }
  return found;
}

mode_t mode_of(const fs::path& path) {
  struct stat status {};
  EXPECT_EQ(lstat(path.c_str(), &status), 0) << path;
  return status.st_mode;
}

/// The message of the refusal; empty where there is none.
std::string refusal(const fs::path& path) {
  try {
    const ReportFile report(path, "--report");
  } catch (const UsageError& error) {
    return error.what();
  }
  return {};
}

/// The message of the Error that the commit ends with; empty where it does not.
std::string commit_error(ReportFile& report, const std::string& text) {
  try {
    report.commit(text);
  } catch (const UsageError&) {
    return "a UsageError";
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(ReportFile, AppearsCompleteOnCommit) {
  const ScratchFolder folder;
  const auto path = folder.write("report.json", "old");
  {
    ReportFile report(path, "--report");
    EXPECT_EQ(ScratchFolder::read(path), "old");
    EXPECT_EQ(names(folder.path()), std::set<std::string>{"report.json"}) << "a kill now would leave more";
    report.commit("new and longer");
  }
  EXPECT_EQ(ScratchFolder::read(path), "new and longer");
  EXPECT_EQ(names(folder.path()), std::set<std::string>{"report.json"});
}

TEST(ReportFile, OnePlaceIsRefusedByEachOfItsNames) {
  const ScratchFolder folder;
  const fs::path file = folder.path() / "a.json";
  const fs::path link = folder.path() / "link";
  const fs::path same = folder.path() / "same";
  fs::create_symlink("a.json", link);  // there is no file yet
  fs::create_directory_symlink(folder.path(), same);
  for (const fs::path& other : {file, folder.path() / "." / "a.json", link, same / "a.json", same / "link"}) {
    try {
      require_own_files({{"--report", file}, {"--trace", {}}, {"--journal", other}});
      ADD_FAILURE() << other;
    } catch (const UsageError& error) {
      EXPECT_EQ(error.what(), "--report and --journal are both '" + file.string() + "'; give each its own file");
    }
  }
  EXPECT_NO_THROW(require_own_files({{"--report", file}, {"--journal", folder.path() / "b.json"}}));
  EXPECT_NO_THROW(require_own_files({{"--report", {}}, {"--journal", {}}}));
}

TEST(ReportFile, RelativePathsToOnePlaceAreRefused) {
  EXPECT_THROW(require_own_files({{"--report", "a.json"}, {"--journal", "./a.json"}}), UsageError);
  EXPECT_THROW(require_own_files({{"--report", "a.json"}, {"--journal", fs::current_path() / "a.json"}}), UsageError);
}

TEST(ReportFile, LeavesNothingWithoutCommit) {
  const ScratchFolder folder;
  { const ReportFile report(folder.path() / "report.json", "--report"); }
  EXPECT_TRUE(names(folder.path()).empty());
}

TEST(ReportFile, ANewFileKeepsThePermissionsOfTheOld) {
  const ScratchFolder folder;
  const auto path = folder.write("report.json", "old");
  chmod(path.c_str(), 0600);
  ReportFile(path, "--report").commit("new");
  EXPECT_EQ(mode_of(path), mode_t{S_IFREG | 0600});
}

TEST(ReportFile, RefusesPlacesThatCannotBeWritten) {
  const ScratchFolder folder;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "No such file", refusal(folder.path() / "absent" / "report.json"));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "is a folder", refusal(folder.path()));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "Not a directory", refusal(folder.write("file", "") / "report.json"));
  EXPECT_EQ(names(folder.path()), std::set<std::string>{"file"});
}

TEST(ReportFileDeathTest, RefusesAFileThatMayNotBeWritten) {
  const ScratchFolder folder;
  const auto path = folder.write("report.json", "old");
  chmod(path.c_str(), 0444);
  chmod(folder.path().c_str(), 0777);
  EXPECT_EXIT(
      {
        // As root everything may be written.
        const bool other = geteuid() != 0 || setresuid(65534, 65534, 65534) == 0;
        std::fputs(refusal(path).c_str(), stderr);
        std::_Exit(other ? 0 : 1);
      },
      testing::ExitedWithCode(0), "Permission denied");
  EXPECT_EQ(ScratchFolder::read(path), "old");
}

TEST(ReportFile, ALinkStaysAndItsFileIsReplaced) {
  const ScratchFolder folder;
  const ScratchFolder elsewhere;
  const auto target = elsewhere.write("run.json", "old");
  fs::create_symlink(target, folder.path() / "latest");
  fs::create_symlink("latest", folder.path() / "report.json");
  ReportFile(folder.path() / "report.json", "--report").commit("new");
  EXPECT_TRUE(fs::is_symlink(folder.path() / "report.json"));
  EXPECT_TRUE(fs::is_symlink(folder.path() / "latest"));
  EXPECT_TRUE(S_ISREG(mode_of(target)));
  EXPECT_EQ(ScratchFolder::read(target), "new");
  EXPECT_EQ(names(elsewhere.path()), std::set<std::string>{"run.json"});
}

TEST(ReportFile, ADanglingLinkStaysAndItsFileIsMade) {
  const ScratchFolder folder;
  fs::create_symlink("run.json", folder.path() / "report.json");
  ReportFile(folder.path() / "report.json", "--report").commit("new");
  EXPECT_TRUE(fs::is_symlink(folder.path() / "report.json"));
  EXPECT_TRUE(S_ISREG(mode_of(folder.path() / "run.json")));
  EXPECT_EQ(ScratchFolder::read(folder.path() / "run.json"), "new");
}

TEST(ReportFile, LinksThatLeadToNoPlaceAreRefused) {
  const ScratchFolder folder;
  fs::create_symlink("absent/run.json", folder.path() / "dangling");
  fs::create_symlink("loop", folder.path() / "loop");
  fs::create_symlink(".", folder.path() / "folder");
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "No such file", refusal(folder.path() / "dangling"));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "Too many levels", refusal(folder.path() / "loop"));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "is a folder", refusal(folder.path() / "folder"));
}

/// A device node of the test's own, full as /dev/full is; for other users than root that one itself, which they cannot replace.
class FullDevice {
 public:
  explicit FullDevice(const fs::path& own) : path_(geteuid() == 0 ? own : fs::path("/dev/full")) {
    made_ = geteuid() != 0 || mknod(own.c_str(), S_IFCHR | 0666, makedev(1, 7)) == 0;
    const int opened = open(path_.c_str(), O_WRONLY);  // a mount may forbid devices
    made_ = made_ && opened >= 0;
    close(opened);
  }
  [[nodiscard]] const fs::path& path() const noexcept { return path_; }
  [[nodiscard]] bool made() const noexcept { return made_; }

 private:
  fs::path path_;
  bool made_ = false;
};

TEST(ReportFile, ADeviceIsWrittenIntoNeverReplaced) {
  const ScratchFolder folder;
  const FullDevice full(folder.path() / "full");
  if (!full.made()) {
    GTEST_SKIP() << "this machine makes no device node";
  }
  fs::create_symlink(full.path(), folder.path() / "link");
  for (const fs::path& path : {full.path(), folder.path() / "link"}) {
    ReportFile report(path, "--report");
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "cannot be written: No space left on device",
                        commit_error(report, "new"));
  }
  EXPECT_TRUE(S_ISCHR(mode_of(full.path())));
  EXPECT_TRUE(S_ISLNK(mode_of(folder.path() / "link")));
  fs::create_symlink("/dev/null", folder.path() / "null");
  ReportFile(folder.path() / "null", "--report").commit("new");
  EXPECT_TRUE(S_ISLNK(mode_of(folder.path() / "null")));
}

TEST(ReportFile, APipeIsWrittenIntoNeverReplaced) {
  const ScratchFolder folder;
  const fs::path path = folder.path() / "pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "without a reader", refusal(path));
  const int reader = open(path.c_str(), O_RDONLY | O_NONBLOCK);
  ReportFile report(path, "--report");
  report.commit("new");
  char text[8] = {};
  EXPECT_EQ(read(reader, text, sizeof text), 3);
  EXPECT_STREQ(text, "new");
  close(reader);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "Broken pipe", commit_error(report, "again"));
  EXPECT_TRUE(S_ISFIFO(mode_of(path)));
  EXPECT_EQ(names(folder.path()), std::set<std::string>{"pipe"});
}

TEST(ReportFile, ASocketIsRefused) {
  const ScratchFolder folder;
  const fs::path path = folder.path() / "socket";
  const int made = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  path.string().copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(bind(made, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "a socket", refusal(path));
  EXPECT_TRUE(S_ISSOCK(mode_of(path)));
  close(made);
}

TEST(ReportFile, TheFileOfTheProgramsOwnOutputIsRefused) {
  const ScratchFolder folder;
  const auto path = folder.write("log", "");
  const int before = dup(STDERR_FILENO);
  const int log = open(path.c_str(), O_WRONLY);
  dup2(log, STDERR_FILENO);
  const std::string by_name = refusal(path);
  const std::string by_link = refusal("/proc/self/fd/2");
  dup2(before, STDERR_FILENO);
  close(before);
  close(log);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "own output", by_name);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "own output", by_link);
}

TEST(ReportFile, AFileThatBecameSomethingElseMeanwhileIsNotReplaced) {
  const ScratchFolder folder;
  const fs::path path = folder.path() / "report.json";
  ReportFile report(path, "--report");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_NE(commit_error(report, "new"), "");
  EXPECT_TRUE(S_ISFIFO(mode_of(path)));
  EXPECT_EQ(names(folder.path()), std::set<std::string>{"report.json"});
}

TEST(ReportFile, ASizeLimitLeavesTheOldFileAndNothingHalfWritten) {
  const ScratchFolder folder;
  const auto path = folder.write("report.json", "old");
  ReportFile report(path, "--report");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{4096, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = commit_error(report, std::string(1 << 20, 'x'));
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "cannot be written: File too large", error);
  EXPECT_EQ(ScratchFolder::read(path), "old");
  EXPECT_EQ(names(folder.path()), std::set<std::string>{"report.json"});
}

TEST(ReportFileDeathTest, AFullDiskLeavesTheOldFileAndNothingHalfWritten) {
  const ScratchFolder folder;
  EXPECT_EXIT(
      {
        // The mount is the child's own and goes with it.
        if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
            mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0) {
          std::fputs("cannot mount", stderr);
          std::_Exit(0);
        }
        const auto path = folder.write("report.json", "old");
        ReportFile report(path, "--report");
        std::fputs(commit_error(report, std::string(1 << 20, 'x')).c_str(), stderr);
        const bool whole =
            ScratchFolder::read(path) == "old" && names(folder.path()) == std::set<std::string>{"report.json"};
        std::_Exit(whole ? 0 : 1);
      },
      testing::ExitedWithCode(0), "No space left on device|cannot mount");
}

}  // namespace
}  // namespace sidestream::cli
