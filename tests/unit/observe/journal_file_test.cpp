#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <unistd.h>

#include "sidestream/error.h"
#include "sidestream/journal.h"

namespace sidestream {
namespace {

class JournalFile : public testing::Test {
 protected:
  JournalFile() {
    std::string pattern = testing::TempDir() + "sidestream-journal-XXXXXX";
    const int descriptor = mkstemp(pattern.data());
    close(descriptor);
    path_ = pattern;
  }
  ~JournalFile() override { std::filesystem::remove(path_); }

  /// Two streams, an event, and one unordered pair.
  static Journal sample() {
    Journal journal;
    journal.names = {"", "mm", "copy", "blocks.0", "forward"};
    journal.streams = {"main", "copies"};
    journal.sites.push_back({3, 4, 2});
    journal.accesses = {{0x1000, 64, true, false}, {0x1000, 64, false, false}, {0x9000, 64, true, true}};
    journal.operations.push_back({JournalKind::compute, 0, 0, 1, 1, 0, 1});
    journal.operations.push_back({JournalKind::record, 0, 3, 0, 1, 0, 0});
    journal.operations.push_back({JournalKind::copy_to_host, 1, 0, 2, 1, 1, 2});
    journal.operations.push_back({JournalKind::freed_behind, 0, 0, 0, 1, 1, 1});
    return journal;
  }

  void write(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }

  /// What reading the file, or such a content of one, is refused with.
  std::string refusal() const {
    return refusal([this] { return read_journal(path_); });
  }
  static std::string refusal(const std::string& content) {
    return refusal([&] { return parse_journal(content, "content"); });
  }
  template <class Read>
  static std::string refusal(const Read& read) {
    try {
      (void)read();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "it was read";
  }

  std::string path_;
};

TEST_F(JournalFile, WhatIsWrittenIsRead) {
  const Journal journal = sample();
  write(journal_bytes(journal));
  const Journal read = read_journal(path_);
  EXPECT_EQ(journal_bytes(read), journal_bytes(journal));
  EXPECT_EQ(read.operations.size(), 4U);
  EXPECT_TRUE(read.accesses[2].pinned);
  ASSERT_EQ(check_order(read).size(), 1U);
  EXPECT_EQ(check_order(read), check_order(journal));
}

TEST_F(JournalFile, EveryNumberThatAnEventMayHaveIsRead) {
  Journal journal = sample();
  for (JournalOperation& operation : journal.operations) {
    operation.event = 0xffffffff;
  }
  const Journal read = parse_journal(journal_bytes(journal), "memory");
  EXPECT_EQ(journal_bytes(read), journal_bytes(journal));
  EXPECT_EQ(check_order(read).size(), 1U);
}

TEST_F(JournalFile, AnAccessOfAnUnknownKindIsRefused) {
  const std::string bytes = journal_bytes(sample());
  std::string body = bytes.substr(0, bytes.size() - sizeof(std::uint64_t));
  body.back() = 4;  // the flags of the last access
  std::uint64_t checksum = 14695981039346656037ULL;
  for (const char byte : body) {
    checksum = (checksum ^ static_cast<unsigned char>(byte)) * 1099511628211ULL;
  }
  for (int shift = 0; shift < 64; shift += 8) {
    body.push_back(static_cast<char>(checksum >> shift));
  }
  write(body);
  EXPECT_NE(refusal().find("is damaged: an access"), std::string::npos) << refusal();
}

TEST_F(JournalFile, AnEmptyJournalIsOne) {
  write(journal_bytes(Journal()));
  EXPECT_TRUE(check_order(read_journal(path_)).empty());
}

TEST_F(JournalFile, EveryTruncationIsRefused) {
  const std::string bytes = journal_bytes(sample());
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_NE(refusal(bytes.substr(0, length)), "it was read") << length << " bytes";
  }
}

TEST_F(JournalFile, EveryChangedByteIsRefused) {
  const std::string bytes = journal_bytes(sample());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ 0x41);
    EXPECT_NE(refusal(changed), "it was read") << "byte " << i;
  }
}

TEST_F(JournalFile, WhatIsWrongIsSaid) {
  const std::string bytes = journal_bytes(sample());
  write("%PDF-1.7 and more than nineteen bytes");
  EXPECT_NE(refusal().find("is not a journal"), std::string::npos) << refusal();
  std::string newer = bytes;
  newer[19] = 3;
  write(newer);
  EXPECT_NE(refusal().find("is of version 3, and this program reads those up to 2"), std::string::npos) << refusal();
  write(bytes.substr(0, 60));
  EXPECT_NE(refusal().find("is truncated"), std::string::npos) << refusal();
  write(bytes + "x");
  EXPECT_NE(refusal().find("is damaged"), std::string::npos) << refusal();
  std::filesystem::remove(path_);
  EXPECT_NE(refusal().find("cannot be read: No such file"), std::string::npos) << refusal();
  std::filesystem::create_directory(path_);
  EXPECT_NE(refusal().find("cannot be read"), std::string::npos) << refusal();
}

TEST_F(JournalFile, MoreThanTheMemoryIsRefusedWithItsSize) {
  write("sidestream journal\n");
  std::filesystem::resize_file(path_, std::uintmax_t{1} << 42);  // sparse
  EXPECT_NE(refusal().find("has 4398046511104 bytes"), std::string::npos) << refusal();
}

}  // namespace
}  // namespace sidestream
