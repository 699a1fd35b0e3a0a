#include "analysis/order_check.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

constexpr std::uint32_t kMain = 0;
constexpr std::uint32_t kSide = 1;
constexpr std::uint32_t kThird = 2;

/// A journal written by hand.
class OrderCheck : public testing::Test {
 protected:
  OrderCheck() { journal_.streams = {"main", "side", "third"}; }

  std::uint32_t name(const std::string& text) {
    journal_.names.push_back(text);
    return static_cast<std::uint32_t>(journal_.names.size() - 1);
  }
  void add(JournalKind kind, std::uint32_t stream, std::uint32_t event,
           const std::vector<JournalAccess>& accesses = {}) {
    JournalOperation operation;
    operation.kind = kind;
    operation.stream = stream;
    operation.event = event;
    operation.name = name("operation " + std::to_string(journal_.operations.size()));
    operation.first_access = journal_.accesses.size();
    operation.accesses = static_cast<std::uint32_t>(accesses.size());
    journal_.accesses.insert(journal_.accesses.end(), accesses.begin(), accesses.end());
    journal_.operations.push_back(operation);
  }
  void reads(std::uint32_t stream, std::uint64_t begin, std::uint64_t bytes = 100) {
    add(JournalKind::compute, stream, 0, {{begin, bytes, false}});
  }
  void writes(std::uint32_t stream, std::uint64_t begin, std::uint64_t bytes = 100) {
    add(JournalKind::compute, stream, 0, {{begin, bytes, true}});
  }
  void record(std::uint32_t stream, std::uint32_t event) { add(JournalKind::record, stream, event); }
  void wait(std::uint32_t stream, std::uint32_t event) { add(JournalKind::wait, stream, event); }

  std::vector<OrderFinding> findings() const {
    OrderChecker checker;
    checker.read(journal_);
    return checker.findings();
  }

  Journal journal_;
};

TEST_F(OrderCheck, WorkOfOneStreamIsInOrder) {
  writes(kMain, 1000);
  reads(kMain, 1000);
  writes(kMain, 1000);
  EXPECT_TRUE(findings().empty());
}

TEST_F(OrderCheck, ReadsNeedNoOrder) {
  reads(kMain, 1000);
  reads(kSide, 1000);
  reads(kThird, 1050);
  EXPECT_TRUE(findings().empty());
}

TEST_F(OrderCheck, EachUnorderedPairIsFound) {
  writes(kMain, 1000);
  reads(kSide, 1000);   // after a write
  writes(kSide, 1000);  // after a write
  reads(kThird, 5000);
  writes(kMain, 5000);  // after a read
  const auto found = findings();
  ASSERT_EQ(found.size(), 3U);
  EXPECT_TRUE(found[0].first_writes && !found[0].second_writes);
  EXPECT_TRUE(found[1].first_writes && found[1].second_writes);
  EXPECT_TRUE(!found[2].first_writes && found[2].second_writes);
  EXPECT_EQ(found[2].first, 3U);
  EXPECT_EQ(found[2].second, 4U);
}

TEST_F(OrderCheck, OnlyTheSharedBytesCount) {
  writes(kMain, 1000, 100);
  reads(kSide, 1100, 50);
  reads(kSide, 950, 50);
  EXPECT_TRUE(findings().empty());
  reads(kThird, 1099, 50);
  const auto found = findings();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].begin, 1099U);
  EXPECT_EQ(found[0].bytes, 1U);
}

TEST_F(OrderCheck, AnEventOrdersWhatIsBeforeItsRecord) {
  writes(kMain, 1000);
  record(kMain, 1);
  writes(kMain, 3000);
  wait(kSide, 1);
  reads(kSide, 1000);
  EXPECT_TRUE(findings().empty());
  reads(kSide, 3000);
  EXPECT_EQ(findings().size(), 1U) << "written after the record";
}

TEST_F(OrderCheck, AWaitIsForTheRecordCurrentAtItsPlace) {
  record(kMain, 1);
  wait(kSide, 1);
  writes(kMain, 1000);
  record(kMain, 1);
  reads(kSide, 1000);
  EXPECT_EQ(findings().size(), 1U);
}

TEST_F(OrderCheck, OrderIsTransitive) {
  writes(kMain, 1000);
  record(kMain, 1);
  wait(kSide, 1);
  record(kSide, 2);
  wait(kThird, 2);
  writes(kThird, 1000);
  EXPECT_TRUE(findings().empty());
}

TEST_F(OrderCheck, AWriteMustBeBehindEveryReader) {
  reads(kMain, 1000);
  reads(kSide, 1000);
  record(kSide, 1);
  wait(kThird, 1);
  writes(kThird, 1000);
  const auto found = findings();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].first, 0U);
}

TEST_F(OrderCheck, ALaterReadOfTheSameStreamStandsForTheEarlier) {
  writes(kMain, 1000);
  reads(kMain, 1000);
  record(kMain, 1);
  reads(kMain, 1000);
  wait(kSide, 1);
  writes(kSide, 1000);
  const auto found = findings();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].first, 3U);
}

TEST_F(OrderCheck, WhatTheHostHasSeenIsBeforeAllThatItIssuesLater) {
  writes(kMain, 1000);
  add(JournalKind::host_waits_stream, kMain, 0);
  reads(kSide, 1000);
  writes(kSide, 2000);
  record(kSide, 1);
  add(JournalKind::host_waits_event, kSide, 1);
  writes(kThird, 2000);
  writes(kMain, 3000);
  add(JournalKind::host_waits_device, kMain, 0);
  reads(kThird, 3000);
  EXPECT_TRUE(findings().empty());
}

TEST_F(OrderCheck, TheHostsOwnAccessesCount) {
  writes(kMain, 1000);
  add(JournalKind::host_access, 0, 0, {{1000, 10, false}});
  ASSERT_EQ(findings().size(), 1U) << "the copy may still run";
  add(JournalKind::host_waits_stream, kMain, 0);
  add(JournalKind::host_access, 0, 0, {{1000, 10, true}});
  reads(kSide, 1000);
  EXPECT_EQ(findings().size(), 1U) << "issued after the host's access";
}

TEST_F(OrderCheck, AWaitForAnEventThatNothingRecordedIsAFinding) {
  wait(kSide, 7);
  const auto found = findings();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].kind, OrderFinding::Kind::never_recorded);
}

TEST_F(OrderCheck, AnOperationIsNoConflictWithItself) {
  add(JournalKind::compute, kMain, 0, {{1000, 100, false}, {1000, 100, true}, {1050, 10, false}});
  EXPECT_TRUE(findings().empty());
}

TEST_F(OrderCheck, LikeFindingsAreReportedOnce) {
  const std::uint32_t one = name("one");
  const std::uint32_t other = name("other");
  for (std::uint64_t step = 1; step <= 10; ++step) {
    journal_.sites.push_back({0, 0, step});
    writes(kMain, 1000);
    journal_.operations.back().name = one;
    journal_.operations.back().site = static_cast<std::uint32_t>(step);
    add(JournalKind::host_waits_stream, kSide, 0);
    reads(kSide, 1000);
    journal_.operations.back().name = other;
    journal_.operations.back().site = static_cast<std::uint32_t>(step);
    add(JournalKind::host_waits_device, kMain, 0);
  }
  EXPECT_EQ(findings().size(), 1U);
}

TEST_F(OrderCheck, AGrowingJournalIsReadOn) {
  OrderChecker checker;
  writes(kMain, 1000);
  checker.read(journal_);
  reads(kSide, 1000);
  checker.read(journal_);
  EXPECT_EQ(checker.operations(), 2U);
  EXPECT_EQ(checker.findings().size(), 1U);
}

TEST_F(OrderCheck, AFindingNamesBothSidesAndTheCure) {
  journal_.sites.push_back({name("blocks.3.fc1"), name("offload"), 4});
  journal_.sites.push_back({name("blocks.5"), name("launch forward"), 4});
  add(JournalKind::copy_to_host, kSide, 0, {{0x1000, 64, false}});
  journal_.operations.back().site = 1;
  journal_.operations.back().name = name("copy_to_host");
  writes(kMain, 0x1020, 64);
  journal_.operations.back().site = 2;
  journal_.operations.back().name = name("aten::mm");
  const auto found = findings();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(
      describe(journal_, found[0]),
      "copy_to_host on side (offload of blocks.3.fc1, step 4) reads [0x1020, +32 bytes), and aten::mm on main (launch "
      "forward of blocks.5, step 4) writes them without being ordered after it; cure: main waits for an event that "
      "side records after the first");
}

}  // namespace
}  // namespace sidestream
