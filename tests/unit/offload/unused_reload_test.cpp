// A reloaded storage that nobody used is held until its copy can harm no one: with that hold and without it.
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "memory/storage_view.h"
#include "observe/checked_runtime.h"
#include "observe/operator_observer.h"
#include "offload/eager_offload.h"
#include "offload/scope_tree.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream {
namespace {

constexpr std::int64_t kReloadNumel = 1024;
constexpr std::size_t kStorageBytes = kReloadNumel * sizeof(float);

/// Hands everything on, but lets storages go without asking: the hold is out.
class NotHolding final : public StorageMover {
 public:
  explicit NotHolding(std::shared_ptr<EagerOffload> inner) : inner_(std::move(inner)) {}
  void group_ended(Group& group) override { inner_->group_ended(group); }
  c10::Storage fetch(SavedStorage& storage) override { return inner_->fetch(storage); }
  void dropped(SavedStorage& /*storage*/) noexcept override {}

 private:
  std::shared_ptr<EagerOffload> inner_;
};

class UnusedReloadTest : public testing::TestWithParam<bool> {};

TEST_P(UnusedReloadTest, ItsMemoryIsLentAgainBehindItsCopyOnly) {
  const bool held = GetParam();
  const auto checked = std::make_shared<CheckedRuntime>(make_runtime(c10::Device(c10::DeviceType::PrivateUse1, 0)));
  const OperatorObserverGuard observing([&](const OperatorAccess& access) { checked->observe(access); });
  const auto arena = std::make_shared<HostArena>(*checked, std::size_t{1} << 20);
  const std::size_t sizes[] = {kStorageBytes, kStorageBytes};
  ASSERT_EQ(arena->plan(sizes), (std::vector<bool>{true, true}));
  arena->seal();
  const auto offload = std::make_shared<EagerOffload>(checked, std::make_shared<GroupMover>(checked, arena),
                                                      CopyLimits{std::nullopt, 0, 0});
  std::shared_ptr<StorageMover> mover = offload;
  if (!held) {
    mover = std::make_shared<NotHolding>(offload);
  }
  ScopeTree tree(NamePatterns::parse("**"));
  const auto filled = [&](float value) {
    return at::full({kReloadNumel}, value, c10::TensorOptions().dtype(at::kFloat).device(checked->device()));
  };
  Group groups[2];
  std::vector<std::shared_ptr<SavedStorage>> saved;
  std::vector<at::Tensor> next;
  checked->synchronize_device();
  sim::Recording recording;
  offload->begin_step();
  for (Group& group : groups) {
    group.scope = tree.child(tree.root(), "group");
    saved.push_back(std::make_shared<SavedStorage>(mover, &group, filled(3).storage()));
    saved.back()->to_offload = true;
    saved.back()->streams = {checked->current_stream()};
    group.storages.push_back(saved.back());
    offload->group_ended(group);
  }
  (void)offload->fetch(*saved[1]);  // and the one before it comes back ahead of its use
  ASSERT_EQ(saved[0]->place, SavedStorage::Place::reloading);
  saved[0].reset();
  for (int i = 0; i < 4; ++i) {
    next.push_back(filled(5));  // takes what is free
  }
  offload->end_step();
  recording.stop();
  const std::vector<std::string> findings = checked->findings();
  EXPECT_EQ(findings.empty(), held);
  const auto expected = sim::raw_bytes({at::full({4 * kReloadNumel}, 5.0F, at::kFloat)});
  std::string wrong;
  for (std::uint64_t seed = 0; seed < 100 && wrong.empty(); ++seed) {
    const Schedule schedule(Schedule::Kind::seed, seed);
    recording.rerun(schedule);
    wrong = sim::raw_bytes(next) == expected ? "" : schedule.name();
  }
  EXPECT_EQ(wrong.empty(), held) << wrong;
  std::printf("EagerOffload::dropped: %s | %s | %s\n",
              held ? "clean" : "what came back unused is held to the end of the step",
              held ? "nothing" : findings.front().c_str(), wrong.c_str());
  recording.restore();
  checked->synchronize_device();
}

INSTANTIATE_TEST_SUITE_P(WithHoldAndWithout, UnusedReloadTest, testing::Values(true, false),
                         [](const testing::TestParamInfo<bool>& info) { return info.param ? "Held" : "NotHeld"; });

}  // namespace
}  // namespace sidestream
