// What an eager step with offload takes from the heap: a program whose operator new counts.
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "graphs/engine/engine_access.h"
#include "memory/storage_view.h"
#include "models/plain_twin.h"
#include "offload/autograd_engine.h"
#include "offload/exclusions.h"
#include "sidestream/scope.h"
#include "unit/graphs/counted_heap.h"
#include "unit/graphs/host_runtime.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kSide = 16;
/// Of one storage that leaves.
constexpr std::int64_t kBytes = kSide * kSide * 4;
/// Sizing, a step that learns the order, and one that is measured.
constexpr int kUnsteady = 3;

/// Hooks that offload nothing and take nothing themselves: what is taken beside them is LibTorch's. A tensor that is asked for is
/// made anew over its storage; one that the engine never offloads is kept as the engine keeps it.
class BareHooks final : public SavedTensorSource {
 public:
  explicit BareHooks(const Exclusions& exclusions) : exclusions_(exclusions) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<Hook>(exclusions_);
  }

 private:
  class Hook final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Hook(const Exclusions& exclusions) : exclusions_(exclusions) {}
    static void* operator new(std::size_t bytes) { return std::malloc(bytes); }
    static void operator delete(void* memory) { std::free(memory); }

    void call_pack_hook(const at::Tensor& tensor) override {
      if (exclusions_.classify(tensor) == Exclusion::none) {
        view_ = StorageView::capture(tensor);
        storage_ = tensor.storage();
      } else if (exclusions_.is_parameter(tensor)) {
        kept_ = tensor;
      } else {
        kept_ = tensor.tensor_data();
      }
    }
    at::Tensor call_unpack_hook() override { return storage_ ? view_.restore(storage_) : kept_; }

   private:
    const Exclusions& exclusions_;
    at::Tensor kept_;
    c10::Storage storage_;
    StorageView view_;
  };

  const Exclusions& exclusions_;
};

class EagerAllocationTest : public testing::Test {
 protected:
  using Run = std::function<void(const at::Tensor& x, const at::Tensor& weight)>;

  struct Taken {
    std::int64_t allocations = 0;
    std::int64_t reloaded = 0;  ///< storages
  };

  EagerAllocationTest() {
    options_.offload("**").min_bytes(kBytes).groups_in_flight(1);
    runtime_->calls.reserve(64);
  }

  [[nodiscard]] static at::Tensor data(std::int64_t seed) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
    return at::randn({kSide, kSide}, generator);
  }
  [[nodiscard]] OffloadEngine engine() { return EngineAccess::engine(model_, options_, runtime_); }

  /// What `run` takes, its step's begin and end with it. All of it runs on this thread; meanwhile autograd's device threads may still free
  /// what earlier tests used, and the simulated device allocates for that.
  template <class Around>
  std::int64_t taken(const Run& run, const Around& around) {
    const at::Tensor x = data(5).requires_grad_(true);
    const std::int64_t before = heap_allocations_of_this_thread();
    around([&] { run(x, weight_); });
    const std::int64_t allocations = heap_allocations_of_this_thread() - before;
    gradients_ = {{"of the input", x.grad()}, {"of the weight", weight_.grad()}};
    weight_.mutable_grad() = at::Tensor();
    return allocations;
  }
  std::int64_t with_bare_hooks(const Exclusions& exclusions, const Run& run) {
    BareHooks hooks(exclusions);
    return taken(run,
                 [&](const auto& body) {
                   const SavedTensorGuard guard(&hooks);
                   body();
                 }) -
           1;  // the guard's own
  }
  std::int64_t plainly(const Run& run) {
    return taken(run, [](const auto& body) { body(); });
  }
  Taken in_step(OffloadEngine& engine, const Run& run) {
    Taken result;
    result.allocations = taken(run, [&](const auto& body) {
      const auto step = engine.step();
      body();
    });
    result.reloaded = engine.report().reloaded_bytes / kBytes;
    return result;
  }

  /// Steps are steady behind the first ones: each takes what LibTorch takes for bare hooks, and what a storage takes that comes back.
  void expect_steady(const Run& run) {
    (void)plainly(run);
    const std::int64_t plain = plainly(run);
    EXPECT_GT(plain, 0) << "operator new is not this program's";
    const StepTensors expected = gradients_;
    OffloadEngine engine = this->engine();
    for (int s = 0; s < kUnsteady; ++s) {
      (void)in_step(engine, run);
    }
    (void)with_bare_hooks(EngineAccess::state(engine).resources().exclusions, run);
    const std::int64_t bare = with_bare_hooks(EngineAccess::state(engine).resources().exclusions, run);
    // Four in a row: tables by address (ska::flat_hash_map) grow once when too many addresses fall on one place, however few they hold.
    int steady = 0;
    std::string taken;
    for (int s = 0; s < 12 && steady < 4; ++s) {
      const Taken step = in_step(engine, run);
      EXPECT_TRUE(same(gradients_, expected));
      EXPECT_GT(step.reloaded, 0);
      const std::int64_t wanted = bare + step.reloaded * of_a_storage();
      steady = step.allocations == wanted ? steady + 1 : 0;
      taken += " " + std::to_string(step.allocations) + " of " + std::to_string(wanted);
    }
    EXPECT_EQ(steady, 4) << "allocations of each step:" << taken << "; a plain step has " << plain
                         << ", one with bare hooks " << bare;
  }
  [[nodiscard]] static std::int64_t of_a_storage() {
    const std::int64_t before = heap_allocations_of_this_thread();
    (void)allocate_storage(c10::DeviceType::CPU, kBytes);
    return heap_allocations_of_this_thread() - before;
  }

  std::shared_ptr<HostRuntime> runtime_ = std::make_shared<HostRuntime>();
  Options options_{c10::DeviceType::CPU};
  torch::nn::Module model_;
  at::Tensor weight_ = model_.register_parameter("weight", data(99).mul(0.1));
  StepTensors gradients_;
};

/// Saves a weight, a storage of two operators, one through a view of it, an output, and what is too small to leave.
at::Tensor layer(const at::Tensor& h, const at::Tensor& weight) {
  const at::Tensor mixed = h * weight;
  const at::Tensor turned = mixed.mul(mixed.t()).tanh();
  return turned * turned.slice(0, 0, 1).mean(1, /*keepdim=*/true).exp();
}

at::Tensor layers(at::Tensor h, const at::Tensor& weight) {
  for (const char* const name : {"first", "second", "third", "fourth"}) {
    const OffloadScope scope(name);
    h = layer(h, weight);
  }
  return h.sum();
}

TEST_F(EagerAllocationTest, AStepTakesWhatLibTorchTakesForItsHooks) {
  expect_steady([](const at::Tensor& x, const at::Tensor& weight) { layers(x, weight).backward(); });
}

TEST_F(EagerAllocationTest, ARetainedGraphTakesNoMore) {
  expect_steady([](const at::Tensor& x, const at::Tensor& weight) {
    const at::Tensor loss = layers(x, weight);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  });
}

TEST_F(EagerAllocationTest, MicrobatchesInFlightTakeNoMore) {
  expect_steady([](const at::Tensor& x, const at::Tensor& weight) {
    at::Tensor before;
    for (int microbatch = 0; microbatch < 4; ++microbatch) {
      const at::Tensor loss = layers(x, weight);
      if (before.defined()) {
        before.backward();
      }
      before = loss;
    }
    before.backward();
  });
}

TEST_F(EagerAllocationTest, TagsMarksAndNestedScopesTakeNoMore) {
  expect_steady([](const at::Tensor& x, const at::Tensor& weight) {
    at::Tensor h = x;
    for (const char* const name : {"first", "second", "third"}) {
      const OffloadScope outer(name);
      const at::Tensor gate = tag((h * weight).exp(), "gate");
      {
        const OffloadScope inner("inner");
        h = layer(gate, weight) * gate;
      }
      h = h.sigmoid() * x;
      const at::Tensor stays = h.tanh();
      mark_not_offload(stays);
      h = stays * stays;
    }
    h.sum().backward();
  });
}

TEST_F(EagerAllocationTest, AStorageThatEveryGroupSavesTakesNoMore) {
  expect_steady([](const at::Tensor& x, const at::Tensor& weight) {
    const at::Tensor shared = (x * weight).tanh();
    at::Tensor h = x;
    for (const char* const name : {"a", "b", "c", "d", "e", "f"}) {
      const OffloadScope scope(name);
      h = layer(h, weight) * shared;
    }
    h.sum().backward();
  });
}

}  // namespace
}  // namespace sidestream::testing_model
