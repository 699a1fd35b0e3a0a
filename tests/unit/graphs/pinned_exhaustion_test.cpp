// The system pins less host memory than the cap allows: what gets none stays on the device, the report says which groups and
// why, and training goes on.
#include <algorithm>
#include <limits>

#include "sim/device/device.h"
#include "unit/graphs/trapped_training.h"

namespace sidestream::testing_model {
namespace {

class PinnedExhaustionTest : public TrappedTraining {
 protected:
  /// The machine has so many bytes to pin, while it lives.
  struct PinnedLimit {
    explicit PinnedLimit(std::size_t bytes) { sim::Device::get().set_pinned_limit(bytes); }
    PinnedLimit(const PinnedLimit&) = delete;
    PinnedLimit& operator=(const PinnedLimit&) = delete;
    ~PinnedLimit() { sim::Device::get().set_pinned_limit(std::numeric_limits<std::size_t>::max()); }
  };

  /// The report after steps that all gave the right gradients.
  Report trained(Subject& subject) const {
    for (std::int64_t s = 0; s < kSteps; ++s) {
      bool began = false;
      train(subject, s, began);
      EXPECT_TRUE(same(gradients(subject.model), expected_[s])) << "step " << s;
    }
    EXPECT_EQ(subject.broken(), "");
    Report report = subject.engine.report();
    EXPECT_EQ(report.pinned_allocations_after_planning, 0);
    return report;
  }

  /// Groups that stay for want of pinned memory; each has a note that names it and says so.
  static std::size_t kept_unpinned(const Report& report) {
    std::size_t kept = 0;
    for (const GroupReport& group : report.groups) {
      if (group.kept_because != "pinned host memory was refused") {
        continue;
      }
      ++kept;
      const std::string begins = "group " + group.name + " stays: ";
      const bool noted = std::any_of(report.notes.begin(), report.notes.end(), [&](const std::string& note) {
        return note.rfind(begins, 0) == 0 && note.find("pinned host memory exhausted") != std::string::npos;
      });
      EXPECT_TRUE(noted) << group.name;
    }
    return kept;
  }
};

TEST_P(PinnedExhaustionTest, WithoutAnyNothingMoves) {
  Subject subject(*this, /*hooks=*/false);
  const PinnedLimit limit(0);
  const Report report = trained(subject);
  EXPECT_EQ(report.offloaded_bytes, 0);
  EXPECT_EQ(report.pinned_bytes, 0);
  EXPECT_GT(kept_unpinned(report), 1U);
}

TEST_P(PinnedExhaustionTest, GroupsThatGetSomeMoveAndTheRestStays) {
  Report whole;
  {
    Subject subject(*this, /*hooks=*/false);
    whole = trained(subject);
    EXPECT_EQ(kept_unpinned(whole), 0U);
    ASSERT_GT(whole.offloaded_bytes, 0);
  }
  Subject subject(*this, /*hooks=*/false);
  const auto half = static_cast<std::size_t>(whole.pinned_bytes / 2);
  {
    const PinnedLimit limit(half);
    const Report report = trained(subject);
    EXPECT_GT(report.offloaded_bytes, 0);
    EXPECT_LT(report.offloaded_bytes, whole.offloaded_bytes);
    EXPECT_LE(report.pinned_bytes, static_cast<std::int64_t>(half));
    EXPECT_GT(kept_unpinned(report), 0U);
  }
  subject.engine.reset();
  const Report later = trained(subject);
  EXPECT_EQ(kept_unpinned(later), 0U) << "planned anew, it asks again";
  EXPECT_EQ(later.offloaded_bytes, whole.offloaded_bytes);
}

INSTANTIATE_TEST_SUITE_P(Wrapped, PinnedExhaustionTest, kTrappedWrappings,
                         [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream::testing_model
