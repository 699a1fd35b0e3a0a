#include "offload/autograd_engine.h"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include "expect_throws.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

using torch::autograd::SavedVariableHooks;

// Keeps a copy of what is saved; may be told to fail.
class CopyingSource final : public SavedTensorSource {
 public:
  std::unique_ptr<SavedVariableHooks> make_hooks() override {
    struct Hooks final : SavedVariableHooks {
      explicit Hooks(CopyingSource& source) : source_(source) { source_.alive += 1; }
      ~Hooks() override { source_.alive -= 1; }
      void call_pack_hook(const at::Tensor& tensor) override {
        if (source_.fail_pack) {
          throw CaptureError("pack refuses");
        }
        source_.packs += 1;
        source_.with_history += tensor.requires_grad() ? 1 : 0;
        EXPECT_FALSE(at::GradMode::is_enabled());
        copy_ = tensor.clone();
      }
      at::Tensor call_unpack_hook() override {
        source_.unpacks += 1;
        source_.unpack_thread = std::this_thread::get_id();
        if (source_.fail_unpack) {
          throw UsageError("unpack refuses");
        }
        return copy_;
      }
      CopyingSource& source_;
      at::Tensor copy_;
    };
    if (decline) {
      return nullptr;
    }
    return std::make_unique<Hooks>(*this);
  }

  int packs = 0, unpacks = 0, alive = 0, with_history = 0;
  bool fail_pack = false, fail_unpack = false, decline = false;
  std::thread::id unpack_thread;
};

at::Tensor leaf(std::vector<std::int64_t> sizes) { return at::randn(sizes).requires_grad_(true); }

class AutogradEngine : public ::testing::Test {
 protected:
  void SetUp() override { install_autograd_engine(); }
  void TearDown() override { EXPECT_EQ(current_saved_tensor_source(), nullptr) << "hooks leaked"; }
};

TEST_F(AutogradEngine, InstallIsIdempotentAndTheSeamWorks) {
  const auto* const engine = &torch::autograd::Engine::get_default_engine();
  EXPECT_NE(engine, &torch::autograd::Engine::get_base_engine());
  install_autograd_engine();
  EXPECT_EQ(engine, &torch::autograd::Engine::get_default_engine());
  EXPECT_NO_THROW(check_saved_tensor_seam());
}

TEST_F(AutogradEngine, HooksSeeWhatIsSavedAndGradientsAreEqual) {
  const at::Tensor x = leaf({4, 8}), w = leaf({8, 8});
  const auto loss = [&] { return at::silu(at::matmul(x, w)).sum(); };
  const auto expected = torch::autograd::grad({loss()}, {x, w});
  CopyingSource source;
  at::Tensor y;
  {
    const SavedTensorGuard guard(&source);
    y = loss();
  }
  EXPECT_EQ(source.packs, 3);
  EXPECT_EQ(source.with_history, 3) << "leaves and casts of weights are known by the history of what is packed";
  const auto got = torch::autograd::grad({y}, {x, w});
  EXPECT_EQ(source.unpacks, 3);
  EXPECT_TRUE(at::equal(got[0], expected[0]));
  EXPECT_TRUE(at::equal(got[1], expected[1]));
  EXPECT_EQ(source.alive, 0) << "hooks end with the graph that was used up";
}

TEST_F(AutogradEngine, RetainedGraphUnpacksOncePerBackward) {
  const at::Tensor x = leaf({4});
  CopyingSource source;
  at::Tensor y;
  {
    const SavedTensorGuard guard(&source);
    y = x.pow(3).sum();
  }
  torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true);
  EXPECT_EQ(source.alive, 1);
  torch::autograd::grad({y}, {x});
  EXPECT_EQ(source.unpacks, 2);
  EXPECT_EQ(source.alive, 0);
}

TEST_F(AutogradEngine, GuardsNestAndNullTurnsHooksOff) {
  const at::Tensor x = leaf({4});
  CopyingSource outer, inner;
  std::vector<at::Tensor> graphs;
  {
    const SavedTensorGuard first(&outer);
    graphs.push_back(x.mul(x));
    {
      const SavedTensorGuard off(nullptr);
      graphs.push_back(x.mul(x));
      const SavedTensorGuard second(&inner);
      graphs.push_back(x.mul(x));
    }
    EXPECT_EQ(current_saved_tensor_source(), &outer);
    graphs.push_back(x.mul(x));
  }
  graphs.push_back(x.mul(x));
  EXPECT_EQ(outer.packs, 4);
  EXPECT_EQ(inner.packs, 2);
}

TEST_F(AutogradEngine, DeclinedTensorsStayAsTheyAre) {
  at::Tensor x = leaf({4});
  CopyingSource source;
  source.decline = true;
  at::Tensor y;
  at::Tensor middle = x.mul(2);
  {
    const SavedTensorGuard guard(&source);
    y = middle.mul(middle).sum();
  }
  middle.add_(1);
  EXPECT_THROW(torch::autograd::grad({y}, {x}), c10::Error) << "autograd's own version check is still on";
}

TEST_F(AutogradEngine, ForwardThatThrowsLeaksNothing) {
  const at::Tensor x = leaf({4});
  CopyingSource source;
  EXPECT_THROW(
      {
        const SavedTensorGuard guard(&source);
        const at::Tensor y = x.mul(x);
        throw std::runtime_error("model");
      },
      std::runtime_error);
  EXPECT_EQ(current_saved_tensor_source(), nullptr);
  EXPECT_EQ(source.alive, 0);
}

TEST_F(AutogradEngine, ErrorsOfHooksKeepTheirType) {
  const at::Tensor x = leaf({4});
  CopyingSource source;
  {
    const SavedTensorGuard guard(&source);
    source.fail_pack = true;
    EXPECT_THROW((void)x.mul(x), CaptureError);
    source.fail_pack = false;
  }
  at::Tensor y;
  {
    const SavedTensorGuard guard(&source);
    y = x.mul(x).sum();
  }
  source.fail_unpack = true;
  EXPECT_THROW(torch::autograd::grad({y}, {x}), UsageError);
}

TEST_F(AutogradEngine, SourceIsOfItsThreadOnly) {
  const at::Tensor x = leaf({4});
  CopyingSource source;
  const SavedTensorGuard guard(&source);
  std::atomic<bool> seen = true;
  std::thread([&] {
    seen = current_saved_tensor_source() != nullptr;
    (void)x.mul(x);
  }).join();
  EXPECT_FALSE(seen);
  EXPECT_EQ(source.packs, 0);
}

// Backward inside backward, as a checkpoint does it: the base engine's reentrant path.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x.mul(x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    const at::AutoGradMode with_grad(true);
    at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    return torch::autograd::grad({x.mul(x)}, {x}, {gradients[0]});
  }
};

TEST_F(AutogradEngine, ReentrantBackwardWorks) {
  const at::Tensor x = leaf({4});
  CopyingSource source;
  at::Tensor y;
  {
    const SavedTensorGuard guard(&source);
    y = Reentrant::apply(x).sum();
  }
  const auto gradient = torch::autograd::grad({y}, {x});
  EXPECT_EQ(source.packs, 1);
  EXPECT_TRUE(at::equal(gradient[0], x.detach().mul(2)));
}

TEST_F(AutogradEngine, DoubleBackwardSavesThroughTheSourceToo) {
  const at::Tensor x = leaf({4});
  CopyingSource source;
  at::Tensor second;
  {
    const SavedTensorGuard guard(&source);
    const at::Tensor y = x.mul(x).mul(x).sum();
    const auto first = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true);
    second = torch::autograd::grad({first[0].sum()}, {x})[0];
  }
  EXPECT_TRUE(at::allclose(second, x.detach().mul(6)));
}

TEST_F(AutogradEngine, AnotherEngineIsRefused) {
  struct Other final : torch::autograd::Engine {
    static Engine& get() {
      static Other engine;
      return engine;
    }
    ~Other() override { stop(); }
  };
  auto* const ours = &torch::autograd::Engine::get_default_engine();
  torch::autograd::set_default_engine_stub(&Other::get);
  EXPECT_THROWS(UsageError, "Is Python's torch loaded in this process?", install_autograd_engine());
  EXPECT_THROWS(UsageError, "did not call the pack hook of a saved tensor", check_saved_tensor_seam());
  torch::autograd::set_default_engine_stub(
      []() -> torch::autograd::Engine& { return torch::autograd::Engine::get_base_engine(); });
  install_autograd_engine();
  EXPECT_EQ(ours, &torch::autograd::Engine::get_default_engine());
}

}  // namespace
}  // namespace sidestream
