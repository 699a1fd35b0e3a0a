#include "tools/cli/text_corpus.h"

#include <cmath>
#include <string>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "sidestream/error.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

std::string message_of(const auto& action) {
  try {
    action();
  } catch (const UsageError& error) {
    return error.what();
  }
  return {};
}

TEST(TextCorpus, ReadsFilesInTheOrderGivenAndHoldsTheLastTenthOut) {
  const ScratchFolder folder;
  const auto first = folder.write("b", "0123456789");
  const auto second = folder.write("a", "abcdefghij");
  const TextCorpus corpus = TextCorpus::read({first, second}, "two files");
  EXPECT_EQ(corpus.bytes(), 20u);
  EXPECT_EQ(corpus.files(), 2u);
  EXPECT_EQ(std::string(corpus.train().begin(), corpus.train().end()), "0123456789abcdefgh");
  EXPECT_EQ(std::string(corpus.held_out().begin(), corpus.held_out().end()), "ij");
}

TEST(TextCorpus, EntropyOfKnownFrequencies) {
  const ScratchFolder folder;
  EXPECT_DOUBLE_EQ(TextCorpus::read({folder.write("one", "aaaa")}, "").byte_entropy(), 0);
  EXPECT_DOUBLE_EQ(TextCorpus::read({folder.write("two", "abab")}, "").byte_entropy(), std::log(2.0));
  const double skewed = -(0.75 * std::log(0.75) + 0.25 * std::log(0.25));
  EXPECT_DOUBLE_EQ(TextCorpus::read({folder.write("skewed", "aaab")}, "").byte_entropy(), skewed);
}

TEST(TextCorpus, BytesAboveAsciiAreKept) {
  const ScratchFolder folder;
  const TextCorpus corpus = TextCorpus::read({folder.write("high", "\xff\xfe\x80z")}, "");
  EXPECT_EQ(corpus.train()[0], 0xff);
  EXPECT_EQ(corpus.train()[2], 0x80);
}

TEST(TextCorpus, RegularFilesLeavesOutLinksAndFoldersAndSortsByName) {
  const ScratchFolder folder;
  folder.write("b", "x");
  folder.write("a", "x");
  std::filesystem::create_symlink("a", folder.path() / "link");
  std::filesystem::create_directory(folder.path() / "folder");
  const auto files = regular_files(folder.path());
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].filename(), "a");
  EXPECT_EQ(files[1].filename(), "b");
  EXPECT_TRUE(regular_files(folder.path() / "absent").empty());
}

TEST(TextCorpus, DefaultTextIsThere) {
  const TextCorpus corpus = TextCorpus::read_default();
  EXPECT_GT(corpus.bytes(), 5000u);
  EXPECT_GT(corpus.byte_entropy(), 2.5);
  EXPECT_LT(corpus.byte_entropy(), 4.0);
}

TEST(TextCorpus, RefusesAbsentEmptyAndFolder) {
  const ScratchFolder folder;
  const std::string absent = message_of([&] { (void)TextCorpus::read({folder.path() / "absent"}, ""); });
  EXPECT_NE(absent.find("cannot be read: No such file"), std::string::npos) << absent;
  const std::string empty = message_of([&] { (void)TextCorpus::read({folder.write("empty", "")}, ""); });
  EXPECT_NE(empty.find("is empty"), std::string::npos) << empty;
  const std::string is_folder = message_of([&] { (void)TextCorpus::read({folder.path()}, ""); });
  EXPECT_NE(is_folder.find("is a folder"), std::string::npos) << is_folder;
  EXPECT_FALSE(message_of([&] { (void)TextCorpus::read({}, ""); }).empty());
}

TEST(TextCorpus, RefusesWhatIsNoRegularFile) {
  const ScratchFolder folder;
  const auto pipe = folder.path() / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/zero", folder.path() / "link");
  for (const auto& path : {pipe, folder.path() / "link", std::filesystem::path("/dev/zero")}) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "is a device or a pipe",
                        message_of([&] { (void)TextCorpus::read({path}, ""); }));
  }
}

TEST(TextCorpus, ReadsNoMoreBytesThanItMay) {
  const ScratchFolder folder;
  const auto file = folder.write("file", std::string(1000, 'a'));
  EXPECT_EQ(TextCorpus::read({file, file}, "", 2000).bytes(), 2000U);
  const std::string more = message_of([&] { (void)TextCorpus::read({file, file}, "", 1999); });
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "more than 1999 bytes", more);
  // A file that says it is empty and is not.
  const auto size = TextCorpus::read({"/proc/cpuinfo"}, "").bytes();
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "more than 100 bytes",
                      message_of([&] { (void)TextCorpus::read({"/proc/cpuinfo"}, "", 100); }));
  EXPECT_GT(size, 100U);
}

TEST(TextCorpus, TooShortTextNamesTheBytesThatAreEnough) {
  const ScratchFolder folder;
  for (const auto& [window, batch] : {std::pair<std::size_t, std::size_t>{17, 4}, {33, 1}, {9, 40}}) {
    const TextCorpus small = TextCorpus::read({folder.write("small", std::string(20, 'a'))}, "");
    const std::string message = message_of([&, w = window, b = batch] { small.require_windows(w, b); });
    const std::string before = "needs ";
    const std::size_t at = message.find(before);
    ASSERT_NE(at, std::string::npos) << message;
    const std::size_t needed = std::stoul(message.substr(at + before.size()));
    const TextCorpus enough = TextCorpus::read({folder.write("enough", std::string(needed, 'a'))}, "");
    EXPECT_NO_THROW(enough.require_windows(window, batch)) << needed;
    const TextCorpus nearly = TextCorpus::read({folder.write("nearly", std::string(needed - 2, 'a'))}, "");
    EXPECT_THROW(nearly.require_windows(window, batch), UsageError) << needed;
  }
}

}  // namespace
}  // namespace sidestream::cli
