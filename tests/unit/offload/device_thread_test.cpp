#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "autocast_region.h"
#include "memory/host_arena.h"
#include "memory/storage_view.h"
#include "observe/operator_observer.h"
#include "offload/autograd_engine.h"
#include "offload/weight_casts.h"
#include "runtime/runtime.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

// Sends every saved storage to the host and back, waiting for each copy: the parts together, without an engine's timing.
class RoundTrip final : public SavedTensorSource {
 public:
  RoundTrip(Runtime& runtime, HostArena& arena) : runtime_(runtime), arena_(arena) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    struct Hooks final : torch::autograd::SavedVariableHooks {
      explicit Hooks(RoundTrip& trip) : trip_(trip) {}
      void call_pack_hook(const at::Tensor& tensor) override {
        trip_.casts += is_weight_cast(tensor) ? 1 : 0;
        view_ = StorageView::capture(tensor);
        const c10::Storage& storage = tensor.storage();
        lease_ = trip_.arena_.lease(storage.nbytes());
        if (!lease_) {
          throw CaptureError("no room");
        }
        const c10::Stream stream = trip_.runtime_.current_stream();
        lease_.wait_before_use(stream);
        trip_.runtime_.copy_to_host(lease_.data(), storage.data(), storage.nbytes(), stream);
        trip_.used(lease_, stream);
      }
      at::Tensor call_unpack_hook() override {
        trip_.unpack_thread = std::this_thread::get_id();
        if (trip_.fail) {
          throw CaptureError("reload refused");
        }
        const c10::Stream stream = trip_.runtime_.current_stream();
        c10::Storage storage = allocate_storage(trip_.runtime_.device(), lease_.bytes());
        trip_.runtime_.copy_to_device(storage.mutable_data(), lease_.data(), lease_.bytes(), stream);
        trip_.used(lease_, stream);
        return view_.restore(std::move(storage));
      }
      RoundTrip& trip_;
      StorageView view_;
      HostArena::Lease lease_;
    };
    return std::make_unique<Hooks>(*this);
  }

  int casts = 0;
  bool fail = false;
  std::thread::id unpack_thread;

 private:
  void used(HostArena::Lease& lease, c10::Stream stream) {
    const auto event = std::make_shared<const Event>(runtime_.create_event());
    runtime_.record(*event, stream);
    lease.record_last_use(event);
  }

  Runtime& runtime_;
  HostArena& arena_;
};

class DeviceThread : public ::testing::Test {
 protected:
  void SetUp() override {
    runtime_ = make_runtime(c10::Device(c10::DeviceType::PrivateUse1, 0));
    install_autograd_engine();  // starts threads for the device where an earlier backward found none
  }
  at::Tensor leaf(std::vector<std::int64_t> sizes) const {
    return at::randn(sizes).to(runtime_->device()).requires_grad_(true);
  }
  std::shared_ptr<Runtime> runtime_;
};

TEST_F(DeviceThread, StoragesGoToTheHostAndComeBackForTheDeviceThread) {
  HostArena arena(*runtime_, 1 << 20);
  RoundTrip trip(*runtime_, arena);
  const at::Tensor x = leaf({8, 16}), w = leaf({16, 16});
  const auto loss = [&] { return at::silu(at::matmul(x, w.t())).t().mul(3).exp().sum(); };
  const auto expected = torch::autograd::grad({loss()}, {x, w});
  for (int step = 0; step < 3; ++step) {
    at::Tensor y;
    {
      const SavedTensorGuard guard(&trip);
      y = loss();
    }
    EXPECT_GT(arena.stats().live_leases, 0U);
    const auto got = torch::autograd::grad({y}, {x, w});
    EXPECT_TRUE(at::equal(got[0].cpu(), expected[0].cpu()));
    EXPECT_TRUE(at::equal(got[1].cpu(), expected[1].cpu()));
  }
  EXPECT_NE(trip.unpack_thread, std::thread::id());
  EXPECT_NE(trip.unpack_thread, std::this_thread::get_id()) << "autograd ran backward on the calling thread";
  arena.seal();
  EXPECT_EQ(arena.stats().allocations_after_seal, 0U);
}

TEST_F(DeviceThread, ErrorsOfUnpackReachTheCallerWithTheirType) {
  HostArena arena(*runtime_, 1 << 20);
  RoundTrip trip(*runtime_, arena);
  const at::Tensor x = leaf({8});
  at::Tensor y;
  {
    const SavedTensorGuard guard(&trip);
    y = x.mul(x).sum();
  }
  trip.fail = true;
  EXPECT_THROW(torch::autograd::grad({y}, {x}), CaptureError);
  trip.fail = false;
  EXPECT_NO_THROW(torch::autograd::grad({x.mul(x).sum()}, {x})) << "the device thread is unusable after an error";
}

TEST_F(DeviceThread, ObserverSeesBackwardOnTheDeviceThread) {
  const at::Tensor x = leaf({8, 8}), w = leaf({8, 8});
  std::thread::id observed;
  bool reads_weight = false;
  {
    const at::Tensor y = at::matmul(x, w).sum();
    const OperatorObserverGuard guard([&](const OperatorAccess& access) {
      if (std::string(access.name) == "aten::mm") {
        observed = std::this_thread::get_id();
        for (const at::Tensor& tensor : access.reads) {
          reads_weight = reads_weight || tensor.is_alias_of(w);
        }
      }
    });
    torch::autograd::grad({y}, {x});
    guard.rethrow();
  }
  EXPECT_TRUE(reads_weight);
  EXPECT_NE(observed, std::thread::id());
  EXPECT_NE(observed, std::this_thread::get_id());
}

TEST_F(DeviceThread, AutocastCopiesOfWeightsAreKnownOnTheDevice) {
  HostArena arena(*runtime_, 1 << 20);
  RoundTrip trip(*runtime_, arena);
  const at::Tensor x = leaf({4, 8}), w = leaf({8, 8});
  {
    const testing_model::AutocastRegion autocast(c10::DeviceType::PrivateUse1);
    const SavedTensorGuard guard(&trip);
    (void)at::linear(at::silu(at::linear(x, w)), w);
  }
  // Each linear saves the copy of w; the first one also the copy of x, which here is a leaf too.
  EXPECT_EQ(trip.casts, 3);
}

}  // namespace
}  // namespace sidestream
