#include "analysis/sequence_groups.h"

#include <vector>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

using Groups = std::vector<std::vector<std::size_t>>;

SequenceStep forward(std::size_t call, std::size_t microbatch = 0) { return {call, microbatch, Direction::forward}; }
SequenceStep backward(std::size_t call, std::size_t microbatch = 0) { return {call, microbatch, Direction::backward}; }
SequenceStep weights(std::size_t call, std::size_t microbatch = 0) { return {call, microbatch, Direction::weights}; }

TEST(SequenceGroupsTest, CallsThatAutogradConnectsAreOneSequence) {
  const RecordedOrder nested{{forward(0), forward(1), forward(2), backward(2), backward(1), backward(0)},
                             {{0, 1}, {1, 2}}};
  EXPECT_EQ(sequence_groups(3, nested), (Groups{{0, 1, 2}}));
  EXPECT_EQ(sequence_groups(0, {}), Groups{});
}

TEST(SequenceGroupsTest, CallsThatAutogradDoesNotConnectAreSequencesOfTheirOwn) {
  const RecordedOrder detached{{forward(0), forward(1), forward(2), backward(2), backward(1), backward(0)}, {{1, 2}}};
  EXPECT_EQ(sequence_groups(3, detached), (Groups{{0}, {1, 2}}));
  const RecordedOrder crossed{{forward(0), forward(1), forward(2), backward(2), backward(1), backward(0)}, {{0, 2}}};
  EXPECT_EQ(sequence_groups(3, crossed), (Groups{{0, 2}, {1}}));
}

TEST(SequenceGroupsTest, ACallThatNoBackwardCanReachJoinsTheCallBeforeIt) {
  const RecordedOrder frozen_first{{forward(0), forward(1), forward(2), backward(2)}, {}, {0, 1}};
  EXPECT_EQ(sequence_groups(3, frozen_first), (Groups{{0, 1, 2}})) << "the first calls are frozen";
  const RecordedOrder evaluation{{forward(0), forward(1), forward(2)}, {}, {0, 1, 2}};
  EXPECT_EQ(sequence_groups(3, evaluation), (Groups{{0, 1, 2}}));
  EXPECT_EQ(sequence_groups(1, {{forward(0)}, {}, {0}}), (Groups{{0}}));
}

TEST(SequenceGroupsTest, ACallThatRanNoBackwardIsOnlyWithThoseThatAutogradConnects) {
  const RecordedOrder last_unused{{forward(0), forward(1), forward(2), backward(1), backward(0)}, {{0, 1}, {1, 2}}};
  EXPECT_EQ(sequence_groups(3, last_unused), (Groups{{0, 1, 2}}));
  const RecordedOrder second_skipped{{forward(0), forward(1), backward(0)}, {}};
  EXPECT_EQ(sequence_groups(2, second_skipped), (Groups{{0}, {1}})) << "a later step may run it at any time";
  EXPECT_EQ(sequence_groups(2, {{forward(0), forward(1)}, {}}), (Groups{{0}, {1}})) << "the whole batch was skipped";
}

TEST(SequenceGroupsTest, ConnectedCallsPartIfTheirSequenceCouldNotReplayTheRecordedOrder) {
  // The backward of the first call runs before that of the second one.
  const RecordedOrder early{{forward(0), forward(1), backward(0), backward(1)}, {{0, 1}}};
  EXPECT_EQ(sequence_groups(2, early), (Groups{{0}, {1}}));
  // Only the third call is in the way.
  const RecordedOrder third{{forward(0), forward(1), forward(2), backward(1), backward(0), backward(2)},
                            {{0, 1}, {1, 2}}};
  EXPECT_EQ(sequence_groups(3, third), (Groups{{0, 1}, {2}}));
}

TEST(SequenceGroupsTest, LaterMicrobatchesCount) {
  // The second microbatch calls the first call again while the second call awaits its backward.
  const RecordedOrder recorded{{forward(0, 0), forward(1, 0), backward(1, 0), backward(0, 0), forward(1, 1),
                                forward(0, 1), backward(0, 1), backward(1, 1)},
                               {{0, 1}}};
  EXPECT_EQ(sequence_groups(2, recorded), (Groups{{0}, {1}}));
}

TEST(SequenceGroupsTest, RunsWithoutABackwardHoldNothingUp) {
  const RecordedOrder recorded{
      {forward(0, 0), forward(1, 0), forward(0, 1), forward(1, 1), backward(1, 1), backward(0, 1)}, {{0, 1}}};
  EXPECT_EQ(sequence_groups(2, recorded), (Groups{{0, 1}}));
}

TEST(SequenceGroupsTest, WeightGradientsHoldNothingUp) {
  const RecordedOrder recorded{{forward(0), forward(1), backward(1), backward(0), weights(0), weights(1)}, {{0, 1}}};
  EXPECT_EQ(sequence_groups(2, recorded), (Groups{{0, 1}}));
}

TEST(SequenceInOrderTest, WeightGradientsAreInTheOrderToo) {
  const RecordedOrder recorded{{forward(0), backward(0), forward(1), weights(0), forward(0, 1), backward(1),
                                backward(0, 1), weights(0, 1), weights(1)},
                               {}};
  const SequenceOrder order = sequence_in_order(recorded);
  EXPECT_EQ(order.weights_index(0), 3U);
  EXPECT_EQ(order.weights_index(1), 4U);
}

TEST(SequenceInOrderTest, CallsAreInTheOrderOfTheirFirstRuns) {
  const RecordedOrder recorded{
      {forward(0), forward(1), backward(1), forward(2), forward(0, 1), backward(0), backward(2), backward(0, 1)},
      {{0, 1}}};
  EXPECT_EQ(sequence_in_order(recorded).steps(),
            (std::vector<SequenceStep>{forward(0), forward(1), backward(1), forward(2), backward(0), backward(2)}));
}

}  // namespace
}  // namespace sidestream
