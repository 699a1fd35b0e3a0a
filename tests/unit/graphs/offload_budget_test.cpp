// Bounds on what is offloaded of some groups: Options::offload_at_most and offload_fraction.
#include <cstddef>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

#include "expect_throws.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "unit/graphs/asked_groups_fixture.h"

namespace sidestream::testing_model {
namespace {

TEST_F(AskedGroups, BudgetsBoundWhatIsOffloaded) {
  struct Case {
    std::int64_t most;
    double fraction;
    std::int64_t offloaded;  ///< of a and b, which the lag does not keep: two storages each
  };
  for (const auto& [most, fraction, offloaded] : {Case{4, 1, 4}, Case{3, 1, 2}, Case{2, 1, 2}, Case{1, 1, 0},
                                                  Case{0, 1, 0}, Case{4, 0.5, 2}, Case{4, 0.49, 0}, Case{4, 0, 0}}) {
    OffloadEngine engine(model_, options().offload_at_most("a,b,c,d", static_cast<std::size_t>(most * kSquareBytes)));
    OffloadEngine by_fraction(model_, options().offload_fraction("**", fraction));
    OffloadEngine& asked = fraction < 1 ? by_fraction : engine;
    two_steps(asked);
    EXPECT_EQ(asked.report().offloaded_bytes, offloaded * kSquareBytes) << most << " storages, " << fraction;
    for (const GroupReport& group : asked.report().groups) {
      if (group.name == "b") {
        EXPECT_EQ(group.kept_because,
                  offloaded == 4 ? "" : "over the budget of Options::offload_at_most or offload_fraction");
      }
    }
  }
}

TEST_F(AskedGroups, ABudgetThatNamesNothingIsRefused) {
  OffloadEngine engine(model_, options().offload_at_most("unknown", kSquareBytes));
  const auto steps = [&] { two_steps(engine); };
  EXPECT_THROWS(UsageError, "unknown", steps());
}

TEST_F(AskedGroups, ABudgetForWhatIsNotOffloadedIsRefused) {
  EXPECT_THROWS(UsageError, "is set without offload", OffloadEngine(model_, Options(device_).offload_fraction("a", 0)));
  OffloadEngine engine(model_, Options(device_).offload("a,b").offload_at_most("a,c", kSquareBytes));
  const auto steps = [&] { two_steps(engine); };
  EXPECT_THROWS(UsageError, "can name only scopes that Options::offload also names: name pattern \"c\"", steps());
}

TEST_F(AskedGroups, ASecondBudgetForTheSameGroupsIsRefused) {
  EXPECT_THROWS(UsageError, "\"a,b\" has two budgets",
                OffloadEngine(model_, options().offload_at_most("a,b", 1).offload_fraction("b, a", 0.5)));
}

TEST_F(AskedGroups, AFractionOutsideOfZeroToOneIsRefused) {
  for (const double fraction : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROWS(UsageError, "from 0 to 1", OffloadEngine(model_, options().offload_fraction("a", fraction)));
    EXPECT_THROWS(UsageError, "for \"a\"", OffloadEngine(model_, options().offload_fraction("a", fraction)));
  }
  EXPECT_THROWS(UsageError, "offload_fraction is 1.0000001 for \"a\"",
                OffloadEngine(model_, options().offload_fraction("a", 1.0000001)));
}

}  // namespace
}  // namespace sidestream::testing_model
