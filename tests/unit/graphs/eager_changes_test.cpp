// Eager steps whose saved tensors are changed in place before they are read.
#include <string>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "expect_throws.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"
#include "unit/graphs/eager_step_fixture.h"

namespace sidestream::testing_model {
namespace {

TEST_F(EagerStep, AWriteBetweenSaveAndUnpackNamesTheGroup) {
  OffloadEngine engine(model_, options().offload("all"));
  expect_plain(engine, three_scopes);
  const Loss broken = [](const at::Tensor& x, const at::Tensor& weight) {
    at::Tensor h = x * weight;
    at::Tensor saved;
    {
      const OffloadScope scope("first");
      saved = h.exp();
      h = saved * 2;
    }
    {
      const OffloadScope scope("second");
      h = h.exp();
    }
    {
      const at::NoGradGuard no_grad;
      saved.add_(1);
    }
    return h.sum();
  };
  EXPECT_THROWS(UsageError, "saved in \"first\", was changed in place", {
    const auto step = engine.step();
    (void)gradients(broken, 0);
  });
  expect_plain(engine, three_scopes);
}

TEST_F(EagerStep, TheErrorOfAWriteNamesTheGroupAfterTheEngineHasGone) {
  const std::string name = "a name that is too long to lie in the string object itself";
  at::Tensor saved;
  at::Tensor loss;
  {
    OffloadEngine engine(model_, options().offload("all"));
    const auto step = engine.step();
    saved = data(0) * weight_;
    const OffloadScope scope(name.c_str());
    loss = saved.exp().sum() + saved.square().sum();
  }
  {
    const at::NoGradGuard no_grad;
    saved.add_(1);
  }
  EXPECT_THROWS(UsageError, "saved in \"" + name + "\", was changed in place", loss.backward());
}

/// Its backward takes what it saved for scratch memory.
struct WritesWhatItSaved : torch::autograd::Function<WritesWhatItSaved> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x.square();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::NoGradGuard no_grad;
    return {context->get_saved_variables()[0].mul_(2).mul_(gradients[0])};
  }
};

TEST_F(EagerStep, AWriteInABackwardIsSeenByTheNextReader) {
  const Loss alone = [](const at::Tensor& x, const at::Tensor& weight) {
    at::Tensor h = x * weight;
    {
      const OffloadScope scope("first");
      h = WritesWhatItSaved::apply(h);
    }
    const OffloadScope scope("second");
    return h.mul(0.01).exp().sum();
  };
  const Loss shared = [](const at::Tensor& x, const at::Tensor& weight) {
    const at::Tensor h = x * weight;
    at::Tensor sum;
    {
      const OffloadScope scope("first");
      sum = h.sin();
      sum = sum + WritesWhatItSaved::apply(h);
    }
    const OffloadScope scope("second");
    return sum.mul(0.01).exp().sum();
  };
  OffloadEngine engine(model_, options().offload("all"));
  expect_plain(engine, alone);
  EXPECT_ANY_THROW((void)gradients(shared, 0)) << "plain training";
  EXPECT_ANY_THROW((void)gradients(alone, 0, 2)) << "plain training";
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROWS(UsageError, "was changed in place", {
      const auto step = engine.step();
      (void)gradients(shared, 0);
    });
    EXPECT_THROWS(UsageError, "was changed in place", {
      const auto step = engine.step();
      (void)gradients(alone, 0, 2);
    });
  }
  expect_plain(engine, alone);
}

}  // namespace
}  // namespace sidestream::testing_model
