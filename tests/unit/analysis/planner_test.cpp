#include "analysis/planner.h"

#include <vector>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

constexpr std::uint64_t kNoCap = UINT64_MAX;
constexpr std::uint64_t kMiB = 1 << 20;

Profile groups(const std::vector<GroupProfile>& list) {
  Profile profile;
  profile.groups = list;
  return profile;
}

std::vector<Fate> fates(const Plan& plan) {
  std::vector<Fate> result;
  for (const Decision& decision : plan.decisions) {
    result.push_back(decision.fate);
  }
  return result;
}

TEST(Planner, MovesWhatSelectedGroupsSave) {
  Profile profile = groups({{"a", true, false}, {"b", false, false}, {"c", true, false}});
  profile.storages = {{100, {0}}, {200, {1}}, {300, {2}}, {400, {0}}};
  const Plan plan = make_plan(profile, kNoCap, 512);
  EXPECT_EQ(fates(plan), (std::vector{Fate::offloaded, Fate::not_selected, Fate::offloaded, Fate::offloaded}));
  EXPECT_EQ(plan.offloaded_bytes, 800U);
  EXPECT_TRUE(plan.notes.empty());
}

TEST(Planner, AGroupThatTurnsRoundStays) {
  Profile profile = groups({{"a", true, false}, {"last", true, true}});
  profile.storages = {{100, {0}}, {200, {1}}, {300, {0, 1}}};
  const Plan plan = make_plan(profile, kNoCap, 512);
  EXPECT_EQ(fates(plan), (std::vector{Fate::offloaded, Fate::needed_immediately, Fate::needed_immediately}));
  EXPECT_EQ(plan.offloaded_bytes, 100U);
  EXPECT_TRUE(plan.notes.empty()) << "no fault of the options";
}

TEST(Planner, WhatTheProgramHoldsItselfStaysAndTakesNoRoom) {
  Profile profile = groups({{"a", true, false}});
  profile.storages = {{4000, {0}, true}, {500, {0}}};
  const Plan plan = make_plan(profile, 512, 512);
  EXPECT_EQ(fates(plan), (std::vector{Fate::held_elsewhere, Fate::offloaded}));
  EXPECT_EQ(plan.offloaded_bytes, 500U);
}

TEST(Planner, AMarkedStorageStaysAndTakesNoRoom) {
  Profile profile = groups({{"a", true, false}});
  profile.storages = {{4000, {0}}, {500, {0}}};
  profile.storages[0].marked = true;
  const Plan plan = make_plan(profile, 512, 512);
  EXPECT_EQ(fates(plan), (std::vector{Fate::marked, Fate::offloaded}));
  EXPECT_EQ(plan.offloaded_bytes, 500U);
}

TEST(Planner, AStaticOutputStaysAndTakesNoRoom) {
  Profile profile = groups({{"a", true, false}, {"b", false, false}, {"last", true, true}});
  profile.storages = {{4000, {0}}, {500, {0}}, {100, {1}}, {100, {2}}};
  for (const std::size_t output : {0, 2, 3}) {
    profile.storages[output].static_output = true;
  }
  const Plan plan = make_plan(profile, 512, 512);
  EXPECT_EQ(fates(plan), (std::vector{Fate::static_output, Fate::offloaded, Fate::not_selected, Fate::static_output}));
  EXPECT_EQ(plan.offloaded_bytes, 500U);
  EXPECT_TRUE(plan.notes.empty());
}

TEST(Planner, AKeptSaverHoldsAStorageBackAndIsNamed) {
  Profile profile = groups({{"attn", true, false}, {"proj", false, false}, {"norm", true, false}});
  profile.storages = {{2 * kMiB, {0, 1}}, {kMiB, {0, 2}}, {kMiB, {1, 0}}};
  const Plan plan = make_plan(profile, kNoCap, 512);
  EXPECT_EQ(fates(plan), (std::vector{Fate::held_back, Fate::offloaded, Fate::not_selected}));
  EXPECT_EQ(plan.decisions[0].held_by, 1U);
  EXPECT_EQ(plan.offloaded_bytes, kMiB);
  ASSERT_EQ(plan.notes.size(), 1U);
  EXPECT_EQ(plan.notes[0],
            "a storage of 2.0 MiB saved by attn stays: proj saves it too and is not offloaded; offload that group too");
}

TEST(Planner, ASaverOutsideOfAllScopesIsNamedToo) {
  Profile profile = groups({{"attn", true, false}, {"", false, false}});
  profile.storages = {{2 * kMiB, {0, 1}}};
  const Plan plan = make_plan(profile, kNoCap, 512);
  ASSERT_EQ(plan.notes.size(), 1U);
  EXPECT_EQ(plan.notes[0],
            "a storage of 2.0 MiB saved by attn stays: (no scope) saves it too and is not offloaded; put that code "
            "into a scope that Options::offload names");
}

TEST(Planner, TheCapTakesWholeGroupsInOrder) {
  Profile profile = groups({{"first", true, false}, {"big", true, false}, {"small", true, false}});
  profile.storages = {{1000, {0}}, {4000, {1}}, {1000, {1}}, {500, {2}}};
  const Plan plan = make_plan(profile, 1024 + 4096 + 512, 512);
  EXPECT_EQ(fates(plan), (std::vector{Fate::offloaded, Fate::over_cap, Fate::over_cap, Fate::offloaded}))
      << "a group that does not fit leaves room for a later, smaller one";
  EXPECT_EQ(plan.offloaded_bytes, 1500U);
  ASSERT_EQ(plan.notes.size(), 1U);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "group big stays", plan.notes[0]);
}

TEST(Planner, ABudgetTakesWholeGroupsOfItsNamesInOrder) {
  Profile profile = groups({{"a", true}, {"b", true}, {"other", true}, {"c", true}, {"kept", true, true}});
  profile.storages = {{1000, {0}}, {4000, {1}}, {9000, {2}}, {500, {3}}, {7000, {4}}};
  for (const std::size_t group : {0, 1, 3, 4}) {
    profile.groups[group].budget = 1;
  }
  profile.budgets = {{1500, 1}};
  const Plan plan = make_plan(profile, kNoCap, 512);
  EXPECT_EQ(fates(plan), (std::vector{Fate::offloaded, Fate::over_budget, Fate::offloaded, Fate::offloaded,
                                      Fate::needed_immediately}))
      << "a group that does not fit leaves room for a later, smaller one; others do not count";
  EXPECT_EQ(plan.offloaded_bytes, 1000U + 9000U + 500U);
  EXPECT_TRUE(plan.notes.empty());
  profile.budgets = {{1499, 1}};
  EXPECT_EQ(make_plan(profile, kNoCap, 512).offloaded_bytes, 1000U + 9000U) << "to the byte";
  profile.budgets = {{0, 1}};
  EXPECT_EQ(make_plan(profile, kNoCap, 512).offloaded_bytes, 9000U);
}

TEST(Planner, AStorageCountsInABudgetOnceForEachOfItsRuns) {
  Profile profile = groups({{"a", true}, {"b", true}});
  profile.storages = {{1000, {0}}, {1000, {1}}};
  for (GroupProfile& group : profile.groups) {
    group.budget = 1;
  }
  profile.storages[0].runs = 3;
  const auto fates_within = [&](const OffloadBudget& budget) {
    profile.budgets = {budget};
    return fates(make_plan(profile, kNoCap, 512));
  };
  EXPECT_EQ(fates_within({4000, 1}), (std::vector{Fate::offloaded, Fate::offloaded}));
  EXPECT_EQ(fates_within({3999, 1}), (std::vector{Fate::offloaded, Fate::over_budget}));
  EXPECT_EQ(fates_within({2999, 1}), (std::vector{Fate::over_budget, Fate::offloaded}));
  EXPECT_EQ(fates_within({kNoCap, 0.75}), (std::vector{Fate::offloaded, Fate::over_budget}));
  EXPECT_EQ(fates_within({kNoCap, 0.74}), (std::vector{Fate::over_budget, Fate::offloaded}));
  profile.budgets = {{kNoCap, 1}};
  EXPECT_EQ(fates(make_plan(profile, 2048, 512)), (std::vector{Fate::offloaded, Fate::offloaded}))
      << "they share their place on the host";
}

TEST(Planner, AFractionIsOfTheBytesThatWouldBeOffloaded) {
  Profile profile = groups({{"a", true}, {"b", true}, {"c", true}, {"d", true}, {"kept", true, true}, {"off", false}});
  profile.storages = {{100, {0}}, {100, {1}}, {100, {2}}, {100, {3}}, {4000, {4}}, {4000, {5}}};
  for (GroupProfile& group : profile.groups) {
    group.budget = 1;
  }
  const auto offloaded = [&](double fraction) {
    profile.budgets = {{kNoCap, fraction}};
    return make_plan(profile, kNoCap, 512).offloaded_bytes;
  };
  EXPECT_EQ(offloaded(1), 400U);
  EXPECT_EQ(offloaded(0.75), 300U);
  EXPECT_EQ(offloaded(0.74), 200U);
  EXPECT_EQ(offloaded(0.5), 200U);
  EXPECT_EQ(offloaded(0), 0U);
}

TEST(Planner, WhatABudgetKeepsTakesNoRoom) {
  Profile profile = groups({{"a", true}, {"b", true}, {"c", true}});
  profile.storages = {{512, {0}}, {512, {1}}, {512, {2}}};
  profile.groups[0].budget = 1;
  profile.groups[1].budget = 2;
  profile.budgets = {{511, 1}, {kNoCap, 1}};
  const Plan plan = make_plan(profile, 1024, 512);
  EXPECT_EQ(fates(plan), (std::vector{Fate::over_budget, Fate::offloaded, Fate::offloaded}));
}

TEST(Planner, SizesCountRoundedUpToTheAlignment) {
  Profile profile = groups({{"a", true, false}});
  profile.storages = {{1, {0}}, {513, {0}}};
  EXPECT_EQ(make_plan(profile, 512 + 1024, 512).offloaded_bytes, 514U);
  EXPECT_EQ(make_plan(profile, 512 + 1023, 512).offloaded_bytes, 0U);
}

TEST(Planner, NoRoomMovesNothing) {
  Profile profile = groups({{"a", true, false}, {"b", true, false}, {"empty", true, false}});
  profile.storages = {{512, {0}}, {512, {1}}};
  const Plan plan = make_plan(profile, 0, 512);
  EXPECT_EQ(fates(plan), (std::vector{Fate::over_cap, Fate::over_cap}));
  EXPECT_EQ(plan.offloaded_bytes, 0U);
  EXPECT_EQ(plan.notes.size(), 2U) << "an empty group needs no word";
}

TEST(Planner, AStorageCountsForItsFirstSaver) {
  Profile profile = groups({{"a", true, false}, {"b", true, false}});
  profile.storages = {{512, {0, 1}}, {512, {1}}};
  const Plan plan = make_plan(profile, 512, 512);
  EXPECT_EQ(fates(plan), (std::vector{Fate::offloaded, Fate::over_cap}));
}

TEST(Planner, AGroupThatGetsNoPinnedMemoryStaysWhole) {
  Profile profile = groups({{"a", true, false}, {"b", true, false}, {"c", false, false}});
  profile.storages = {{kMiB, {0}}, {200, {1}}, {300, {0, 1}}, {400, {0, 2}}};
  Plan plan = make_plan(profile, kNoCap, 512);
  keep_unpinned(plan, profile, 0, "the machine has no more");
  EXPECT_EQ(fates(plan), (std::vector{Fate::not_pinned, Fate::offloaded, Fate::not_pinned, Fate::held_back}));
  EXPECT_EQ(plan.offloaded_bytes, 200U);
  EXPECT_EQ(plan.notes.back(),
            "group a stays: its 1.0 MiB of pinned host memory were refused (the machine has no more)");
}

TEST(Planner, AnEmptyPassGivesAnEmptyPlan) {
  const Plan plan = make_plan({}, kNoCap, 512);
  EXPECT_TRUE(plan.decisions.empty());
  EXPECT_TRUE(plan.notes.empty());
  EXPECT_EQ(plan.offloaded_bytes, 0U);
}

}  // namespace
}  // namespace sidestream
