#include "offload/planned_pass.h"

#include <vector>

#include <gtest/gtest.h>

#include "offload/scope_tree.h"

namespace sidestream {
namespace {

/// What `sizes` find, in their order: 1 for a place that is offloaded, 0 for one that stays, -1 for none.
std::vector<int> taken(const PlannedGroup& group, const std::vector<std::size_t>& sizes) {
  PlannedPlaces places(&group);
  std::vector<int> result;
  for (const std::size_t bytes : sizes) {
    const PlannedStorage* const place = places.take(bytes);
    result.push_back(place == nullptr ? -1 : static_cast<int>(place->to_offload));
  }
  return result;
}

TEST(PlannedPlaces, MatchByOrderAndSize) {
  const PlannedGroup group{{{10, true}, {20, false}, {10, false}, {30, true}}, true};
  EXPECT_EQ(taken(group, {10, 20, 10, 30}), (std::vector{1, 0, 0, 1})) << "as planned";
  EXPECT_EQ(taken(group, {20, 10, 30}), (std::vector{0, 0, 1})) << "the first is missing";
  EXPECT_EQ(taken(group, {15, 10, 20, 10, 30}), (std::vector{-1, 1, 0, 0, 1})) << "one is new";
  EXPECT_EQ(taken(group, {20, 10, 10, 30, 10}), (std::vector{0, 0, 1, 1, -1})) << "another order; each place once";
}

TEST(PlannedPlaces, WithoutAPlanThereAreNone) {
  PlannedPlaces places;
  EXPECT_EQ(places.take(10), nullptr);
}

TEST(PlannedPass, IsLaidOutByScopeAndTurn) {
  ScopeTree tree(NamePatterns::parse("**"));
  const ScopeNode* const a = tree.child(tree.root(), "a");
  const ScopeNode* const b = tree.child(tree.root(), "b");
  Profile profile;
  profile.groups.resize(3);
  profile.storages = {{10, {0}}, {20, {1}}, {30, {2}}, {40, {0}}};
  const std::vector<Decision> decisions{
      {Fate::not_selected, 0}, {Fate::over_cap, 0}, {Fate::offloaded, 0}, {Fate::held_back, 0}};
  const PlannedPass pass = lay_out(profile, {a, b, a}, decisions.data());
  ASSERT_EQ(pass.at(a).size(), 2U);
  EXPECT_EQ(pass.at(a)[0].storages.size(), 2U);
  EXPECT_FALSE(pass.at(a)[0].offloads);
  EXPECT_TRUE(pass.at(a)[1].offloads);
  EXPECT_FALSE(pass.at(b)[0].offloads);
}

TEST(PlannedPass, StaticOutputsHaveNoPlace) {
  ScopeTree tree(NamePatterns::parse("**"));
  const ScopeNode* const a = tree.child(tree.root(), "a");
  const std::vector<Decision> decisions{
      {Fate::offloaded, 0}, {Fate::static_output, 0}, {Fate::static_output, 0}, {Fate::offloaded, 0}};
  Profile profile;
  profile.groups.resize(3);
  profile.storages = {{10, {0}}, {10, {0}}, {10, {1}}, {20, {2}}};
  profile.storages[1].static_output = profile.storages[2].static_output = true;
  const PlannedPass pass = lay_out(profile, {a, a, a}, decisions.data());
  ASSERT_EQ(pass.at(a).size(), 2U) << "the second saves nothing else: it is no group in a later pass";
  EXPECT_EQ(taken(pass.at(a)[0], {10, 10}), (std::vector{1, -1}));
  EXPECT_EQ(taken(pass.at(a)[1], {20}), (std::vector{1}));
  profile.storages[3].savers = {0, 1};
  EXPECT_EQ(lay_out(profile, {a, a, a}, decisions.data()).at(a).size(), 3U) << "now it does";
}

}  // namespace
}  // namespace sidestream
