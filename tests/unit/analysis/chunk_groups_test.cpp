#include "analysis/chunk_groups.h"

#include <vector>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

using Kind = PipelineStep::Kind;

GroupEvent ended(std::uint32_t group) { return {group, GroupEvent::Kind::ended}; }
GroupEvent used(std::uint32_t group) { return {group, GroupEvent::Kind::used}; }

/// Chunk 1 of stage 0 has the groups 0 and 2, chunk 2 of stage 1 has group 1, and chunk 3 of stage 0 has 3 and 4, of which 4 stays.
StepGroups two_stages() {
  StepGroups step;
  step.events = {ended(0), ended(1), ended(2), ended(3), ended(4), used(4), used(3), used(1), used(2), used(0)};
  step.bytes = {{5, 5}, {7, 7}, {6, 6}, {5, 5}, {6, 0}};
  step.chunks = {{0, 1}, {1, 2}, {0, 1}, {0, 3}, {0, 3}};
  return step;
}

TEST(GroupsOfOrderTest, EachChunkDoesWhatThoseOfItsStageDid) {
  const std::vector<PipelineStep> order = {{0, 0, Kind::forward},  {0, 1, Kind::forward}, {1, 0, Kind::forward},
                                           {0, 1, Kind::backward}, {0, 2, Kind::forward}, {1, 0, Kind::backward},
                                           {0, 0, Kind::backward}, {0, 2, Kind::backward}};
  const auto step = groups_of_order(order, two_stages());
  ASSERT_TRUE(step);
  EXPECT_EQ(step->events, (std::vector<GroupEvent>{ended(0), ended(1), ended(2), ended(3), ended(4), used(3), used(2),
                                                   ended(5), ended(6), used(4), used(1), used(0), used(6), used(5)}));
  EXPECT_EQ(step->bytes, (std::vector<GroupBytes>{{5, 5}, {6, 6}, {5, 5}, {6, 6}, {7, 7}, {5, 5}, {6, 6}}));
  EXPECT_EQ(step->chunks, (std::vector<GroupChunk>{{0, 1}, {0, 1}, {0, 2}, {0, 2}, {1, 3}, {0, 4}, {0, 4}}));
}

TEST(GroupsOfOrderTest, AChunkWithoutABackwardOrWithoutGroups) {
  const std::vector<PipelineStep> order = {{1, 5, Kind::forward}, {9, 0, Kind::forward}, {9, 0, Kind::backward}};
  const auto step = groups_of_order(order, two_stages());
  ASSERT_TRUE(step);
  EXPECT_EQ(step->events, (std::vector<GroupEvent>{ended(0)}));
}

TEST(GroupsOfOrderTest, WhatIsNotKnownGivesNone) {
  StepGroups outside = two_stages();
  outside.chunks[1].number = 0;
  EXPECT_FALSE(groups_of_order({{0, 0, Kind::forward}}, outside)) << "a group of no chunk";
  StepGroups uneven = two_stages();
  uneven.chunks[4] = {0, 4};
  EXPECT_FALSE(groups_of_order({{0, 0, Kind::forward}}, uneven)) << "a stage whose chunks differ";
}

TEST(SlotsOfOrderTest, ChunksInFlightHaveSlotsOfTheirOwn) {
  using Slots = std::vector<std::size_t>;
  EXPECT_EQ(slots_of_order(pipeline_order({4, 1, 6}, 1)), (Slots{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(slots_of_order(pipeline_order({4, 1, 6}, 3)), (Slots{0, 0, 0, 0, 0, 0})) << "one at a time";
  const std::vector<PipelineStep> pairs = {{0, 0, Kind::forward},  {0, 1, Kind::forward}, {0, 0, Kind::backward},
                                           {0, 1, Kind::backward}, {0, 2, Kind::forward}, {0, 3, Kind::forward}};
  EXPECT_EQ(slots_of_order(pairs), (Slots{0, 1, 0, 1}));
  const std::vector<PipelineStep> uneven = {{0, 0, Kind::forward}, {0, 0, Kind::backward}, {1, 1, Kind::forward},
                                            {0, 1, Kind::forward}, {0, 1, Kind::backward}, {1, 1, Kind::backward}};
  EXPECT_EQ(slots_of_order(uneven), (Slots{0, 0, 1})) << "the parts differ";
  EXPECT_EQ(slots_of_order(pipeline_order({2, 2, 2}, 0)), (Slots{0, 1, 0, 1})) << "two stages";
  const std::vector<PipelineStep> turned = {{0, 0, Kind::forward},  {0, 1, Kind::forward}, {0, 1, Kind::backward},
                                            {0, 0, Kind::backward}, {0, 2, Kind::forward}, {0, 3, Kind::forward},
                                            {0, 2, Kind::backward}, {0, 3, Kind::backward}};
  EXPECT_EQ(slots_of_order(turned), (Slots{0, 1, 2, 3})) << "backwards of the second part are in another order";
  EXPECT_EQ(slots_of_order({}), Slots());
  std::vector<PipelineStep> delayed;
  for (std::int64_t m = 0; m < 3; ++m) {
    for (const Kind kind : {Kind::forward, Kind::backward, Kind::weight_gradients}) {
      delayed.push_back({0, m, kind});
    }
  }
  EXPECT_EQ(slots_of_order(delayed), (Slots{0, 0, 0}));
  std::swap(delayed[2], delayed[3]);  // F0 B0 F1 W0 B1 W1 F2 B2 W2
  EXPECT_EQ(slots_of_order(delayed), (Slots{0, 1, 2})) << "weight gradients of the first are in flight";
}

}  // namespace
}  // namespace sidestream
