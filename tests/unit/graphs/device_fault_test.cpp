// The n-th call to the device fails, for every n up to the end of some steps: the error comes out typed and names the call,
// nothing is left over, and the same engine trains on with the right gradients.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "graphs/engine/engine_access.h"
#include "models/block_model.h"
#include "models/wrapping.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sim/device/device.h"
#include "unit/graphs/engine_invariants.h"
#include "unit/graphs/fault_runtime.h"
#include "warnings.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;
using testing_model::EngineInvariants;
using testing_model::FaultyRuntime;
using testing_model::gradients;
using testing_model::same;
using testing_model::Wrapping;

/// Makes something fail, once: the n-th from here on, none if negative.
struct DeviceFault {
  std::function<void(std::int64_t)> arm;
  std::function<std::string()> failed;  ///< what did, or empty
  std::string says;                     ///< part of each message; empty for what `failed` gives
};

class DeviceFaultTest : public testing::TestWithParam<Wrapping> {
 protected:
  static constexpr std::int64_t kSteps = 3;

  [[nodiscard]] Options options() const {
    Options options = GetParam().options(device_, 1024);
    options.graph_options(GraphOptions(options.graph_options()).num_warmup_iters(1));
    options.check_steps(checked_ ? 2 * kSteps : 0);
    return options;
  }

  void train(BlockModel& model, OffloadEngine* engine, std::int64_t s) const {
    const auto batch = testing_model::batch_of(shape_, s, device_);
    testing_model::clear_gradients(model);
    testing_model::in_step(engine, [&] { model.loss(batch.tokens, batch.targets).backward(); });
  }

  /// What plain training gives, and what a step of an engine that never failed moves.
  void learn_what_is_right() {
    BlockModel plain(shape_);
    plain.to(device_);
    BlockModel model(shape_);
    model.to(device_);
    OffloadEngine engine(model, options());
    for (std::int64_t s = 0; s < 2 * kSteps; ++s) {
      train(plain, nullptr, s);
      expected_.push_back(gradients(plain));
      train(model, &engine, s);
    }
    offloaded_bytes_ = engine.report().offloaded_bytes;
  }

  /// A capture found the device full once, and was made with less on it.
  static bool captured_again(const Report& report) {
    return std::any_of(report.notes.begin(), report.notes.end(), [](const std::string& note) {
      return note.find("device memory ran out while") != std::string::npos;
    });
  }

  /// Trains with `fault` armed at `n`; false when it was not met any more.
  bool survives(std::int64_t n, const DeviceFault& fault, std::shared_ptr<Runtime> runtime) {
    const std::int64_t live = sim_->live_handles();
    std::string failed;
    {
      BlockModel model(shape_);
      model.to(device_);
      const EngineInvariants invariants(sim_, model);
      OffloadEngine engine(EngineAccess::engine(model, options(), std::move(runtime)));
      fault.arm(n);
      bool thrown = false;
      for (std::int64_t s = 0; s < kSteps && failed.empty(); ++s) {
        try {
          train(model, &engine, s);
          EXPECT_TRUE(same(gradients(model), expected_[s])) << n << ", step " << s;
        } catch (const DeviceError& error) {
          thrown = true;
          EXPECT_PRED_FORMAT2(testing::IsSubstring, fault.says.empty() ? fault.failed() : fault.says, error.what());
        } catch (const std::exception& error) {
          ADD_FAILURE() << fault.failed() << ", " << n << ": " << error.what();
        }
        failed = fault.failed();
      }
      fault.arm(-1);
      const std::string at = failed + ", " + std::to_string(n);
      EXPECT_EQ(invariants.broken(EngineAccess::state(engine)), "") << at;
      for (std::int64_t s = kSteps; s < 2 * kSteps; ++s) {
        try {
          train(model, &engine, s);
          EXPECT_TRUE(same(gradients(model), expected_[s])) << at << ", step " << s;
        } catch (const std::exception& error) {
          ADD_FAILURE() << "after " << at << ", step " << s << ": " << error.what();
        }
      }
      EXPECT_EQ(invariants.broken(EngineAccess::state(engine)), "") << at << ", later";
      const Report report = engine.report();
      if (captured_again(report)) {
        EXPECT_GE(report.offloaded_bytes, offloaded_bytes_) << at;
      } else {
        EXPECT_EQ(report.offloaded_bytes, offloaded_bytes_) << at;
      }
      EXPECT_TRUE(report.order_findings.empty()) << at << ": " << report.order_findings.front();
      if (!failed.empty()) {
        ++outcomes_[failed].tried;
        outcomes_[failed].thrown += thrown ? 1 : 0;
      }
    }
    EXPECT_EQ(sim_->live_handles(), live) << n << ", " << failed;
    return !failed.empty() && !HasFailure();
  }

  void print_outcomes() const {
    for (const auto& [call, outcome] : outcomes_) {
      std::printf("%s | %s | %d | %d thrown, %d done another way, all clean\n", call.c_str(), GetParam().name.c_str(),
                  outcome.tried, outcome.thrown, outcome.tried - outcome.thrown);
    }
  }

  struct Outcome {
    int tried = 0;
    int thrown = 0;
  };
  testing_model::ExpectedWarnings warnings_;  ///< of scopes whose end fails
  c10::Device device_ = find_device("sim");
  std::shared_ptr<Runtime> sim_ = make_runtime(device_);
  bool checked_ = false;
  BlockModel::Shape shape_{.layers = 3, .hidden = 16, .sequence = 8, .batch = 4};
  std::vector<testing_model::StepTensors> expected_;
  std::int64_t offloaded_bytes_ = 0;
  std::map<std::string, Outcome> outcomes_;
};

TEST_P(DeviceFaultTest, EveryFailureIsSurvived) {
  checked_ = true;  // what is done about a failure must leave everything in order, too
  if (GetParam().name == "graphs_1") {
    shape_.layers = 2;  // of many groups. More side streams would keep the groups of both layers on the device
  }
  learn_what_is_right();
  for (std::int64_t n = 0;; ++n) {
    const auto faulty = std::make_shared<FaultyRuntime>(sim_);
    const DeviceFault fault{[&](std::int64_t at) { faulty->fail(at); }, [&] { return faulty->failed(); }, ""};
    if (!survives(n, fault, faulty)) {
      break;
    }
  }
  EXPECT_FALSE(outcomes_.empty());
  print_outcomes();
}

TEST_P(DeviceFaultTest, EveryDeviceAllocationThatFailsIsSurvived) {
  shape_.layers = 2;
  learn_what_is_right();
  sim::Device& device = sim::Device::get();
  const DeviceFault fault{[&](std::int64_t at) { device.fail_allocation(at); },
                          [&] { return std::string(device.allocation_failed() ? "device allocation" : ""); },
                          "out of memory"};
  // One of eight for each wrapping, another one for each, as there are thousands; SIDESTREAM_FAULT_STRIDE=1 tries them all.
  const char* asked = std::getenv("SIDESTREAM_FAULT_STRIDE");
  const std::int64_t stride = asked == nullptr ? 8 : std::max(1L, std::atol(asked));
  const std::int64_t first = static_cast<std::int64_t>(GetParam().name.size()) % stride;
  for (std::int64_t n = first; survives(n, fault, sim_); n += stride) {
  }
  EXPECT_FALSE(outcomes_.empty());
  print_outcomes();
}

INSTANTIATE_TEST_SUITE_P(Wrapped, DeviceFaultTest,
                         testing::Values(Wrapping{"eager", "", "blocks.*.core_attn,blocks.*.proj"},
                                         Wrapping{"graphs_1", "blocks.*", "blocks.*.*", 1},
                                         Wrapping{"graphs_2", "blocks.*", "blocks.*.core_attn,blocks.*.proj", 2},
                                         Wrapping{"mixed", "blocks.0,blocks.1", "**.core_attn,**.proj,**.fc1", 1}),
                         [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream
