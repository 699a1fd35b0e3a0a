// Arguments of one call that are one tensor, or lie in one storage: what the capture made of them is what verification runs, and what
// the body writes of them is refused.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/ruled_model.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kSteps = 5;

/// The two arguments of a call, made from fresh leaves of a step.
struct Arguments {
  std::string name;
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& leaves)> of;
  bool with_gradient = true;
};

class SharedArgumentTest : public testing::Test {
 protected:
  using Body = at::Tensor (*)(const at::Tensor& a, const at::Tensor& b, RuledLayer& layer);

  [[nodiscard]] std::vector<at::Tensor> leaves(std::int64_t s, bool with_gradient) const {
    std::vector<at::Tensor> made;
    for (std::int64_t i = 0; i < 2; ++i) {
      auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(40 + 2 * s + i));
      made.push_back(at::randn({4, RuledLayer::kWidth}, generator).to(device_).requires_grad_(with_gradient));
    }
    return made;
  }
  /// A step's output and gradients: of both leaves and of the weight.
  static std::vector<at::Tensor> run(RuledLayer& layer, const Arguments& arguments, const std::vector<at::Tensor>& from,
                                     const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& body) {
    layer.weight.mutable_grad() = at::Tensor();
    const std::vector<at::Tensor> given = arguments.of(from);
    const at::Tensor out = body(given[0], given[1]);
    out.sum().backward();
    std::vector<at::Tensor> results{out.detach().cpu()};
    for (const at::Tensor& tensor : {from[0], from[1], layer.weight}) {
      if (tensor.grad().defined()) {
        results.push_back(tensor.grad().cpu());
      }
    }
    return results;
  }
  void expect_plain(OffloadEngine& engine, const Arguments& arguments, Body body, std::int64_t first,
                    std::int64_t last) {
    for (std::int64_t s = first; s < last; ++s) {
      const auto step = engine.step();
      const auto mine =
          run(model_.layer(0), arguments, leaves(s, arguments.with_gradient),
              [&](const at::Tensor& a, const at::Tensor& b) { return call("pair", body, a, b, model_.layer(0)); });
      const auto plain = run(twin_.layer(0), arguments, leaves(s, arguments.with_gradient),
                             [&](const at::Tensor& a, const at::Tensor& b) { return body(a, b, twin_.layer(0)); });
      ASSERT_EQ(mine.size(), plain.size()) << arguments.name;
      for (std::size_t i = 0; i < mine.size(); ++i) {
        EXPECT_TRUE(at::equal(mine[i], plain[i])) << arguments.name << ", step " << s << ", result " << i;
      }
    }
  }
  [[nodiscard]] Options options() const { return Options(device_).graph("pair").verify_replays(1000); }

  c10::Device device_ = find_device("sim");
  RuledModel model_{1, RuledLayer::Rule(), device_};
  RuledModel twin_{1, RuledLayer::Rule(), device_};
};

const Arguments kSame[] = {
    {"a leaf twice",
     [](const auto& l) {
       return std::vector<at::Tensor>{l[0], l[0]};
     }},
    {"a tensor that is no leaf, twice",
     [](const auto& l) {
       const at::Tensor x = l[0] * 2;
       return std::vector<at::Tensor>{x, x};
     }},
    {"data twice",
     [](const auto& l) {
       return std::vector<at::Tensor>{l[0], l[0]};
     },
     false},
};
const Arguments kViews[] = {
    {"halves of one tensor",
     [](const auto& l) {
       const at::Tensor x = l[0] * 2;
       return std::vector<at::Tensor>{x.narrow(0, 0, 2), x.narrow(0, 2, 2)};
     }},
    {"a leaf and a view of it",
     [](const auto& l) {
       return std::vector<at::Tensor>{l[0], l[0].view_as(l[0])};
     }},
    {"a leaf and its values",
     [](const auto& l) {
       return std::vector<at::Tensor>{l[0], l[0].detach()};
     }},
    {"halves of data",
     [](const auto& l) {
       return std::vector<at::Tensor>{l[0].narrow(0, 0, 2), l[0].narrow(0, 2, 2)};
     },
     false},
};

at::Tensor product(const at::Tensor& a, const at::Tensor& b, RuledLayer& layer) {
  return (a * layer.weight).tanh() * b + (a.is_same(b) ? 1.0 : 2.0) * a;
}

TEST_F(SharedArgumentTest, OneTensorAsTwoArgumentsIsVerifiedAsOne) {
  for (const Arguments& arguments : kSame) {
    OffloadEngine engine(model_, options());
    expect_plain(engine, arguments, product, 0, kSteps);
    EXPECT_EQ(engine.report().verified_forwards, kSteps - 1) << arguments.name;
    EXPECT_EQ(engine.report().verified_backwards, kSteps - 1) << arguments.name;
  }
}

TEST_F(SharedArgumentTest, ViewsOfOneStorageAreVerifiedAsTwo) {
  for (const Arguments& arguments : kViews) {
    OffloadEngine engine(model_, options());
    expect_plain(engine, arguments, product, 0, kSteps);
    EXPECT_EQ(engine.report().verified_backwards, kSteps - 1) << arguments.name;
  }
}

at::Tensor changed_in_place(const at::Tensor& a, const at::Tensor& b, RuledLayer& layer) {
  b.detach().mul_(3);
  return (a * layer.weight).tanh() + b.sum();
}

TEST_F(SharedArgumentTest, WhatTheBodyWritesOfThemIsRefusedByName) {
  for (const auto& several : {c10::ArrayRef<Arguments>(kSame), c10::ArrayRef<Arguments>(kViews)}) {
    for (const Arguments& arguments : several) {
      OffloadEngine engine(model_, options());
      expect_plain(engine, arguments, changed_in_place, 0, 1);
      EXPECT_THROWS(CaptureError, "graphed call \"pair\": it writes its input", (void)engine.step()) << arguments.name;
    }
  }
}

at::Tensor writes_buffer(const at::Tensor& a, const at::Tensor& b, RuledLayer& layer) {
  const at::Tensor x = a * layer.weight;
  layer.running.add_(layer.member);
  return x * b;
}

/// Each capture has an input of its own for the argument, which the body cannot write through the buffer's name.
TEST_F(SharedArgumentTest, AnArgumentThatTheBodyWritesAsABufferIsFoundByVerification) {
  OffloadEngine engine(model_, options());
  const auto act = [&](std::int64_t s) {
    const auto step = engine.step();
    const at::Tensor a = leaves(s, true)[0];
    call("pair", writes_buffer, a, model_.layer(0).running, model_.layer(0)).sum().backward();
  };
  act(0);
  EXPECT_THROWS(VerificationError, "graphed call \"pair\": replayed, its output 0 differs", act(1));
}

}  // namespace
}  // namespace sidestream::testing_model
