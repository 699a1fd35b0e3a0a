#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sidestream/journal.h"
#include "threads/at_once.h"

namespace sidestream {
namespace {

/// Copies of what streams wrote, every other one without its wait.
Journal journal_of(std::uint32_t rounds) {
  Journal journal;
  journal.names = {"", "mm", "copy"};
  journal.streams = {"main", "copies"};
  for (std::uint32_t i = 0; i < rounds; ++i) {
    const std::uint64_t address = 0x1000 + 64 * (i % 7);
    journal.sites.push_back({2, 1, i});
    const std::uint32_t site = i + 1;
    journal.accesses.push_back({address, 64, true});
    journal.operations.push_back({JournalKind::compute, 0, 0, 1, site, 2ULL * i, 1});
    if (i % 2 == 0) {
      journal.operations.push_back({JournalKind::record, 0, i, 0, site, 0, 0});
      journal.operations.push_back({JournalKind::wait, 1, i, 0, site, 0, 0});
    }
    journal.accesses.push_back({address, 64, false});
    journal.operations.push_back({JournalKind::copy_to_host, 1, 0, 2, site, 2ULL * i + 1, 1});
  }
  return journal;
}

TEST(OrderCheckThreads, OneJournalMayBeCheckedByMany) {
  const Journal journal = journal_of(400);
  const std::vector<std::string> expected = check_order(journal);
  const std::string bytes = journal_bytes(journal);
  ASSERT_FALSE(expected.empty());
  std::vector<int> equal(4);
  test::at_once(4, [&](int number) {
    const bool read = journal_bytes(parse_journal(bytes, "shared")) == bytes;
    equal[static_cast<std::size_t>(number)] =
        read && journal_bytes(journal) == bytes && check_order(journal) == expected;
  });
  EXPECT_EQ(equal, std::vector<int>(4, 1));
}

}  // namespace
}  // namespace sidestream
