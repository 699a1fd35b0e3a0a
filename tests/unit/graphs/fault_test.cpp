// The n-th call to the device fails, for every n up to the end of some steps: the error comes out typed, nothing is leaked, and
// the same engine trains on with the right gradients.
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "graphs/engine_state.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "unit/graphs/block_model.h"
#include "unit/graphs/wrapping.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;
using testing_model::Wrapping;

/// Fails one call that may fail on a device.
class FaultyRuntime final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;

  /// The call number `n` (from 0) from here on fails; none if negative.
  void fail(std::int64_t n) { left_ = n; }
  /// What failed, or empty.
  [[nodiscard]] const std::string& failed() const { return failed_; }

  OwnedStream create_stream() override { return may_fail("create_stream"), inner().create_stream(); }
  Event create_event(EventTiming timing) override { return may_fail("create_event"), inner().create_event(timing); }
  ExternalEvent create_external_event() override {
    return may_fail("create_external_event"), inner().create_external_event();
  }
  MemoryPool create_pool() override { return may_fail("create_pool"), inner().create_pool(); }
  void record(const Event& event, c10::Stream stream) override { may_fail("record"), inner().record(event, stream); }
  void record(const ExternalEvent& event, c10::Stream stream) override {
    may_fail("record"), inner().record(event, stream);
  }
  void wait(c10::Stream stream, const Event& event) override { may_fail("wait"), inner().wait(stream, event); }
  void wait(c10::Stream stream, const ExternalEvent& event) override { may_fail("wait"), inner().wait(stream, event); }
  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override {
    may_fail("copy_to_host"), inner().copy_to_host(pinned, device, bytes, stream);
  }
  void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) override {
    may_fail("copy_to_device"), inner().copy_to_device(device, pinned, bytes, stream);
  }
  PinnedMemory allocate_pinned(std::size_t bytes) override {
    return may_fail("allocate_pinned"), inner().allocate_pinned(bytes);
  }
  void begin_capture(c10::Stream stream, const MemoryPool& pool) override {
    may_fail("begin_capture"), inner().begin_capture(stream, pool);
  }
  Graph end_capture(c10::Stream stream) override {
    if (fails("end_capture")) {
      inner().abandon_capture(stream);  // as a driver that refuses to end it
      throw DeviceError("end_capture was made to fail");
    }
    return inner().end_capture(stream);
  }
  void launch(const Graph& graph, c10::Stream stream) override { may_fail("launch"), inner().launch(graph, stream); }

 private:
  bool fails(const char* call) {
    if (left_ < 0 || left_-- > 0) {
      return false;
    }
    failed_ = call;
    return true;
  }
  void may_fail(const char* call) {
    if (fails(call)) {
      throw DeviceError(std::string(call) + " was made to fail");
    }
  }
  std::int64_t left_ = -1;
  std::string failed_;
};

class FaultTest : public testing::TestWithParam<Wrapping> {
 protected:
  void SetUp() override { shape_.layers = 3; }

  void train(BlockModel& model, OffloadEngine* engine, std::int64_t s) const {
    const auto batch = testing_model::batch_of(shape_, s, device_);
    testing_model::clear_gradients(model);
    if (engine == nullptr) {
      model.loss(batch.tokens, batch.targets).backward();
      return;
    }
    const auto step = engine->step();  // its end may throw, which an optional would not let out
    model.loss(batch.tokens, batch.targets).backward();
  }

  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_;
};

TEST_P(FaultTest, EveryFailureIsSurvived) {
  constexpr std::int64_t kSteps = 3;
  const auto sim = make_runtime(device_);
  BlockModel plain(shape_);
  plain.to(device_);
  std::vector<std::vector<at::Tensor>> expected;
  for (std::int64_t s = 0; s < kSteps; ++s) {
    train(plain, nullptr, s);
    expected.push_back(testing_model::gradients(plain));
  }
  std::map<std::string, int> survived;
  for (std::int64_t n = 0;; ++n) {
    const std::int64_t live = sim->live_handles();
    std::string failed;
    {
      const auto faulty = std::make_shared<FaultyRuntime>(sim);
      BlockModel model(shape_);
      model.to(device_);
      OffloadEngine engine(std::make_shared<EngineState>(model, GetParam().options(device_, 1024), faulty));
      faulty->fail(n);
      for (std::int64_t s = 0; s < kSteps; ++s) {
        try {
          train(model, &engine, s);
        } catch (const DeviceError& error) {
          EXPECT_NE(std::string(error.what()).find("was made to fail"), std::string::npos) << error.what();
        } catch (const std::exception& error) {
          ADD_FAILURE() << "call " << n << ", " << faulty->failed() << ": " << error.what();
        }
      }
      failed = faulty->failed();
      faulty->fail(-1);
      for (std::int64_t s = 0; s < kSteps; ++s) {
        try {
          train(model, &engine, s);
          EXPECT_TRUE(testing_model::same(testing_model::gradients(model), expected[s]))
              << "call " << n << ", " << failed << ", step " << s;
        } catch (const std::exception& error) {
          ADD_FAILURE() << "after call " << n << ", " << failed << ", step " << s << ": " << error.what();
        }
      }
    }
    EXPECT_EQ(sim->live_handles(), live) << "call " << n << ", " << failed;
    if (failed.empty()) {
      break;
    }
    ++survived[failed];
  }
  for (const auto& [call, count] : survived) {
    std::printf("%s | %s | %d survived\n", GetParam().name.c_str(), call.c_str(), count);
  }
}

INSTANTIATE_TEST_SUITE_P(Wrapped, FaultTest,
                         testing::Values(Wrapping{"eager", "", "blocks.*.core_attn,blocks.*.proj,blocks.*.fc1"},
                                         Wrapping{"graphs_1", "blocks.*", "blocks.*.*", 1},
                                         Wrapping{"graphs_2", "blocks.*", "blocks.*.*", 2},
                                         Wrapping{"mixed", "blocks.0,blocks.1", "**.core_attn,**.proj,**.fc1", 1}),
                         [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream
