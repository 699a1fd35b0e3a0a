#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <thread>

#include "operator_cases.h"
#include "runtime/runtime.h"
#include "sim/rerun/recording.h"

namespace {

using sidestream::sim::Access;
using sidestream::sim::RecordedWork;
using sidestream::test::parameter;
using sidestream::test::same_bits;
using sidestream::test::values;

std::vector<const RecordedWork*> named(const sidestream::sim::Recording& recording, const std::string& name) {
  std::vector<const RecordedWork*> found;
  for (const RecordedWork& recorded : recording.works()) {
    if (recorded.work->name == name) {
      found.push_back(&recorded);
    }
  }
  return found;
}

bool touches(const RecordedWork& recorded, const at::Tensor& tensor, bool write) {
  const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
  for (const Access& access : recorded.work->accesses) {
    if (access.begin == begin && access.bytes == tensor.nbytes() && access.write == write) {
      return true;
    }
  }
  return false;
}

TEST(OperatorStreams, WorkNamesItsOperatorAndWhatItReadsAndWrites) {
  const c10::Device device = sidestream::test::sim();
  const at::Tensor x = values({4, 8}, device), y = values({4, 8}, device);
  const at::Tensor mean = at::zeros({8}).to(device), var = at::ones({8}).to(device);
  at::Tensor sum;
  sidestream::sim::Recording recording;
  y.add_(x);
  sum = at::mm(x, y.t());
  (void)at::batch_norm(x, {}, {}, mean, var, true, 0.1, 1e-5, false);
  recording.stop();
  const auto added = named(recording, "aten::add_.Tensor"), product = named(recording, "aten::mm");
  const auto norm = named(recording, "aten::native_batch_norm");
  ASSERT_EQ(added.size(), 1);
  ASSERT_EQ(product.size(), 1);
  ASSERT_EQ(norm.size(), 1);
  EXPECT_TRUE(touches(*added[0], x, false));
  EXPECT_TRUE(touches(*added[0], y, true));
  EXPECT_FALSE(touches(*added[0], y, false));
  EXPECT_TRUE(touches(*product[0], x, false));
  EXPECT_TRUE(touches(*product[0], y, false));
  EXPECT_TRUE(touches(*product[0], sum, true));
  EXPECT_TRUE(touches(*norm[0], mean, true));
  EXPECT_TRUE(touches(*norm[0], var, true));
}

TEST(OperatorStreams, BackwardRunsOnTheStreamOfItsForwardAndIsOrdered) {
  const c10::Device device = sidestream::test::sim();
  const auto runtime = sidestream::make_runtime(device);
  const sidestream::OwnedStream side = runtime->create_stream();
  const at::Tensor x = parameter({4, 4}, device);
  sidestream::sim::Recording recording;
  at::Tensor y = x.exp();
  {
    const sidestream::StreamGuard guard(*runtime, side.get());
    sidestream::Event ready = runtime->create_event();
    runtime->record(ready, c10::Stream(c10::Stream::DEFAULT, device));
    runtime->wait(side.get(), ready);
    y = y.tanh();
    runtime->record(ready, side.get());
    runtime->wait(c10::Stream(c10::Stream::DEFAULT, device), ready);
  }
  const at::Tensor grad = torch::autograd::grad({y.sum()}, {x})[0];
  recording.stop();
  const auto backward = named(recording, "aten::tanh_backward");
  ASSERT_EQ(backward.size(), 1);
  EXPECT_EQ(backward[0]->work->stream, side.get().id());
  // exp's backward on the default stream reads what tanh's wrote on the side stream: autograd's events order the two, so
  // every schedule gives the same bytes.
  const at::Tensor expected = grad.cpu();
  for (const char* name : {"late", "early", "seed:1", "seed:2", "seed:3"}) {
    recording.rerun(sidestream::Schedule::parse(name));
    EXPECT_TRUE(same_bits(expected, grad)) << name;
  }
}

TEST(OperatorStreams, ThreadsComputeOnStreamsOfTheirOwn) {
  const c10::Device device = sidestream::test::sim();
  const auto runtime = sidestream::make_runtime(device);
  at::manual_seed(3);
  const at::Tensor weight = at::randn({32, 32});
  const at::Tensor on_device = weight.to(device);
  const auto chain = [](at::Tensor x, const at::Tensor& w) {
    for (int i = 0; i < 50; ++i) {
      x = at::tanh(at::mm(x, w)).add_(0.1);
    }
    return x;
  };
  const at::Tensor expected = chain(weight, weight);
  std::vector<at::Tensor> results(4);
  std::vector<std::thread> threads;
  for (at::Tensor& result : results) {
    threads.emplace_back([&] {
      const sidestream::OwnedStream stream = runtime->create_stream();
      const sidestream::StreamGuard guard(*runtime, stream.get());
      result = chain(on_device, on_device).cpu();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const at::Tensor& result : results) {
    EXPECT_TRUE(same_bits(expected, result));
  }
}

}  // namespace
