#include "observe/order_check.h"

#include <initializer_list>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sidestream/error.h"

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
    add(JournalKind::compute, stream, 0, {{begin, bytes, false, false}});
  }
  void writes(std::uint32_t stream, std::uint64_t begin, std::uint64_t bytes = 100) {
    add(JournalKind::compute, stream, 0, {{begin, bytes, true, false}});
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
  add(JournalKind::host_access, 0, 0, {{1000, 10, false, true}});
  ASSERT_EQ(findings().size(), 1U) << "the copy may still run";
  add(JournalKind::host_waits_stream, kMain, 0);
  add(JournalKind::host_access, 0, 0, {{1000, 10, true, true}});
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
  add(JournalKind::compute, kMain, 0, {{1000, 100, false, false}, {1000, 100, true, false}, {1050, 10, false, false}});
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

TEST_F(OrderCheck, ClocksThatTakeTooMuchMemoryAreRefused) {
  for (std::uint32_t stream = 0; stream < 100; ++stream) {
    journal_.streams.push_back("stream");
    writes(stream, 1000 + 64 * stream);
    add(JournalKind::record, stream, stream);
  }
  OrderChecker enough(20000);
  enough.read(journal_);
  EXPECT_EQ(enough.operations(), 200U);
  OrderChecker checker(5000);
  EXPECT_THROW(checker.read(journal_), UsageError);
}

TEST_F(OrderCheck, AFindingNamesBothSidesAndTheCure) {
  journal_.sites.push_back({name("blocks.3.fc1"), name("offload"), 4});
  journal_.sites.push_back({name("blocks.5"), name("launch forward"), 4});
  add(JournalKind::copy_to_host, kSide, 0, {{0x1000, 64, false, false}});
  journal_.operations.back().site = 1;
  journal_.operations.back().name = name("copy_to_host");
  writes(kMain, 0x1020, 64);
  journal_.operations.back().site = 2;
  journal_.operations.back().name = name("aten::mm");
  const auto found = findings();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(describe(journal_, found[0]),
            "copy_to_host on side (offload of blocks.3.fc1, step 4) reads [0x1020, +32 bytes), and aten::mm on main "
            "(launch forward of blocks.5, step 4) writes them, but nothing orders the second after the first; fix: "
            "main must wait for an event that side records after the first operation");
}

TEST_F(OrderCheck, AFindingAboutAHostSlotSaysSo) {
  journal_.sites.push_back({name("blocks.3.fc1"), name("reload"), 4});
  journal_.sites.push_back({name("blocks.0.fc1"), name("offload"), 5});
  add(JournalKind::copy_to_device, kSide, 0, {{0x1000, 64, false, true}});
  journal_.operations.back().site = 1;
  add(JournalKind::copy_to_host, kThird, 0, {{0x1000, 64, true, true}});
  journal_.operations.back().site = 2;
  const auto found = findings();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(describe(journal_, found[0]),
            "operation 0 on side (reload of blocks.3.fc1, step 4) reads pinned host memory [0x1000, +64 bytes), and "
            "operation 1 on third (offload of blocks.0.fc1, step 5) writes them, but nothing orders the second after "
            "the first; fix: third must wait for an event that side records after the first operation");
}

TEST_F(OrderCheck, WhereTheHostIsTheOneThatMustWaitTheCureSaysSo) {
  add(JournalKind::copy_to_device, kSide, 0, {{0x1000, 64, false, true}});
  add(JournalKind::host_access, 0, 0, {{0x1000, 8, true, true}});
  const auto found = findings();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(describe(journal_, found[0]),
            "operation 0 on side reads pinned host memory [0x1000, +8 bytes), and operation 1 by the host writes them, "
            "but nothing orders the second after the first; fix: the host must wait for an event that side records "
            "after the first operation");
}

TEST_F(OrderCheck, MemoryUsedAgainInALaterStepIsTheSameMemory) {
  // A slot of two graphs of one pool: step after step, the second launch of the first must be behind the second's.
  for (int step = 0; step < 2; ++step) {
    writes(kMain, 1000);
    record(kMain, 1);
    wait(kSide, 1);
    writes(kSide, 1000);
  }
  const auto found = findings();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].first, 3U);
  EXPECT_EQ(found[0].second, 4U);
}

TEST_F(OrderCheck, WhatIsFreedBehindAStreamIsBehindItsAccessesAlone) {
  writes(kMain, 1000, 200);
  record(kMain, 1);
  wait(kSide, 1);
  wait(kThird, 1);
  reads(kSide, 1000, 200);
  writes(kSide, 5000);
  reads(kThird, 1050, 10);
  add(JournalKind::freed_behind, kSide, 0, {{1000, 100, false, false}});
  writes(kMain, 1000, 50);
  EXPECT_TRUE(findings().empty());
  writes(kMain, 1000);
  writes(kMain, 1100);
  reads(kMain, 5000);
  const auto found = findings();
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found[0].first, 6U) << "the third stream was not waited for";
  EXPECT_EQ(found[0].begin, 1050U);
  EXPECT_EQ(found[0].bytes, 10U);
  EXPECT_EQ(found[1].first, 4U) << "what lies beside the freed bytes";
  EXPECT_EQ(found[1].begin, 1100U);
  EXPECT_EQ(found[2].first, 5U) << "other memory is none of it";
}

TEST_F(OrderCheck, ALikeFindingInTheSamePlaceIsOneOnlyThere) {
  // Names and phases of places are numbers: no two places may be taken for one.
  const std::uint32_t operation = name("operation");
  for (std::uint32_t place = 0; place < 200; ++place) {
    journal_.sites.push_back({name("layer"), 0, 1});
    journal_.sites.push_back({0, name("phase"), 1});
  }
  for (std::uint32_t site = 1; site <= 400; ++site) {
    writes(kMain, 1000 * std::uint64_t{site});
    reads(kSide, 1000 * std::uint64_t{site});
    for (std::size_t i = journal_.operations.size() - 2; i < journal_.operations.size(); ++i) {
      journal_.operations[i].name = operation;
      journal_.operations[i].site = site;
    }
  }
  EXPECT_EQ(findings().size(), 400U);
}

/// `count` operations of a training step's kind: layers on one stream with their copies on others, memory used again and again.
void append_steps(Journal& journal, std::size_t count) {
  constexpr std::uint64_t kLayers = 48;
  const auto add = [&](JournalKind kind, std::uint32_t stream, std::uint32_t event,
                       std::initializer_list<JournalAccess> accesses) {
    JournalOperation operation;
    operation.kind = kind;
    operation.stream = stream;
    operation.event = event;
    operation.first_access = journal.accesses.size();
    operation.accesses = static_cast<std::uint32_t>(accesses.size());
    journal.accesses.insert(journal.accesses.end(), accesses);
    journal.operations.push_back(operation);
  };
  for (std::uint64_t step = 0; journal.operations.size() < count; ++step) {
    for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
      const std::uint64_t saved = 0x100000 * (1 + layer);
      const std::uint64_t slot = 0x900000000 + 0x100000 * layer;
      for (std::uint64_t part = 0; part < 12; ++part) {  // each reads what the one before wrote, in pieces now and then
        const std::uint64_t from = saved + 0x1000 * part;
        add(JournalKind::compute, kMain, 0,
            {{from, 0x1000 - 0x10 * (part % 3), false, false},
             {0x800000000 + 0x1000 * layer, 0x1000, false, false},  // a weight, which nothing writes
             {from + 0x1000, 0x1000, true, false}});
      }
      add(JournalKind::record, kMain, 1, {});
      add(JournalKind::wait, kSide, 1, {});
      add(JournalKind::copy_to_host, kSide, 0, {{saved, 0xD000, false, false}, {slot, 0xD000, true, true}});
      add(JournalKind::record, kSide, 2, {});
      add(JournalKind::wait, kThird, 2, {});
      add(JournalKind::copy_to_device, kThird, 0, {{slot, 0xD000, false, true}, {saved, 0xD000, true, false}});
      add(JournalKind::record, kThird, 3, {});
      add(JournalKind::wait, kMain, 3, {});
    }
  }
}

TEST_F(OrderCheck, TheWorkGrowsWithTheOperationsAlone) {
  OrderChecker checker;
  append_steps(journal_, 100'000);
  checker.read(journal_);
  const std::uint64_t small = checker.work() / checker.operations();
  append_steps(journal_, 1'000'000);
  checker.read(journal_);
  EXPECT_GE(checker.operations(), 1'000'000U);
  EXPECT_TRUE(checker.findings().empty());
  EXPECT_GT(small, 0U);
  EXPECT_LE(checker.work() / checker.operations(), small + small / 10) << "more for each operation than at the start";
}

}  // namespace
}  // namespace sidestream
