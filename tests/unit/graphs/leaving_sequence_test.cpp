// What other streams still read of a sequence when it goes.
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "models/stack_twins.h"
#include "runtime/runtime.h"
#include "sidestream/device.h"
#include "sidestream/graph_pool.h"
#include "sidestream/testing/simulator.h"

namespace sidestream::testing_model {
namespace {

class LeavingSequenceTest : public testing::Test {
 protected:
  static constexpr std::int64_t kLayers = 3;

  LeavingSequenceTest() { set_schedule(device_, Schedule::parse("late")); }
  ~LeavingSequenceTest() override { set_schedule(device_, Schedule()); }

  [[nodiscard]] GraphOptions pooled() const {
    return GraphOptions().pool(pool_).gradients("**", GradientPolicy::owned);
  }
  /// Copies `tensor` to the host on a stream that nobody waits for; such copies come late.
  PinnedMemory read_beside(const at::Tensor& tensor) {
    const Event given = runtime_->create_event();
    runtime_->record(given, runtime_->current_stream());
    runtime_->wait(beside_, given);
    PinnedMemory read = runtime_->allocate_pinned(tensor.nbytes());
    runtime_->copy_to_host(read.data(), tensor.const_data_ptr(), tensor.nbytes(), beside_);
    tensor.record_stream(beside_);
    return read;
  }
  /// Outputs of a sequence, or gradients of its parameters, are read beside and let go of; then the sequence goes, or a part of it, by
  /// `leave`, and another one computes in the memory.
  void expect_reads_right(bool of_gradients, const std::string& which,
                          const std::function<void(std::optional<StackTwins>&)>& leave) {
    SCOPED_TRACE(which + (of_gradients ? ", gradients" : ", outputs"));
    StackTwins second(device_, kLayers + 2, pooled());
    std::optional<StackTwins> first(std::in_place, device_, kLayers, pooled());
    std::vector<at::Tensor> given;
    at::Tensor h = rows(0, device_).requires_grad_(true);
    for (const GraphedCallable& layer : first->layers) {
      h = layer({h})[0];
      given.push_back(h.detach());
    }
    h.sum().backward();
    h.reset();
    if (of_gradients) {
      given.clear();
      for (const at::Tensor& parameter : first->model->parameters()) {
        given.push_back(parameter.grad());
      }
    }
    std::vector<at::Tensor> expected;
    for (const at::Tensor& tensor : given) {
      expected.push_back(tensor.cpu());
    }
    std::vector<PinnedMemory> read;
    for (const at::Tensor& tensor : given) {
      read.push_back(read_beside(tensor));
    }
    given.clear();
    first->model->zero_grad();
    leave(first);
    (void)second.expect_plain(1);
    runtime_->synchronize(beside_);
    for (std::size_t i = 0; i < read.size(); ++i) {
      EXPECT_EQ(std::memcmp(read[i].data(), expected[i].const_data_ptr(), expected[i].nbytes()), 0) << i;
    }
  }

  c10::Device device_ = find_device("sim");
  std::shared_ptr<Runtime> runtime_ = make_runtime(device_);
  OwnedStream beside_ = runtime_->create_stream();
  std::shared_ptr<GraphPool> pool_ = std::make_shared<GraphPool>(device_);
};

TEST_F(LeavingSequenceTest, WaitsForWhoReadsWhatNobodyHolds) {
  for (const bool of_gradients : {false, true}) {
    for (const std::size_t layer : {0U, 1U, 2U}) {
      expect_reads_right(of_gradients, "reset of layer " + std::to_string(layer),
                         [&](auto& first) { first->layers[layer].reset(); });
    }
    expect_reads_right(of_gradients, "reset of all", [](auto& first) {
      for (GraphedCallable& layer : first->layers) {
        layer.reset();
      }
    });
    expect_reads_right(of_gradients, "end of the engine", [](auto& first) { first.reset(); });
  }
}

}  // namespace
}  // namespace sidestream::testing_model
