// What a call is given: every type of argument and result is an input, a guard or kept by value, and gives plain training's
// gradients.
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "warnings.h"

namespace sidestream {
namespace testing_model {

struct Slope {
  double value = 0.0;
  bool operator==(const Slope& other) const { return value == other.value; }
};
struct Shift {
  std::int64_t value = 0;
};

}  // namespace testing_model

template <>
struct ArgumentTraits<testing_model::Slope> : ComparedByValue {};
template <>
struct ArgumentTraits<testing_model::Shift> {
  static bool equal(const testing_model::Shift& a, const testing_model::Shift& b) { return a.value == b.value; }
};

namespace {

using testing_model::rows;
using testing_model::StepTensor;
using testing_model::StepTensors;

/// One weight, and a forward for every kind of argument that tests need.
struct Scaler : torch::nn::Module {
  explicit Scaler(double of) : weight(register_parameter("weight", at::full({32}, of))) {}
  at::Tensor forward(const at::Tensor& x) { return (x * weight).tanh(); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) { return (x * weight + y).tanh(); }
  at::Tensor forward(const std::pair<at::Tensor, at::Tensor>& both) {
    return (both.first * weight - both.second).tanh();
  }
  at::Tensor scaled(const at::Tensor& x, double factor) { return (x * weight * factor).tanh(); }
  at::Tensor with(const at::Tensor& x, const at::Tensor* table) {
    return table == nullptr ? x * weight : (x * weight + *table).tanh();
  }
  at::Tensor weight;
};

class CallArguments : public testing::Test {
 protected:
  using Loss = std::function<at::Tensor(Scaler& model, const at::Tensor& x, std::int64_t s)>;

  CallArguments() {
    model_->to(device_);
    plain_->to(device_);
  }

  [[nodiscard]] Options options() const { return Options(device_).graph("**"); }

  /// The gradients of one step with `loss`.
  StepTensors gradients_of(Scaler& model, OffloadEngine* engine, std::int64_t s, const Loss& loss) const {
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    model.zero_grad();
    testing_model::in_step(engine, [&] { loss(model, x, s).backward(); });
    StepTensors result = testing_model::gradients(model);
    result.emplace_back("gradient of x", x.grad());
    testing_model::descend(model);
    return result;
  }
  /// Steps [first, last) with an engine and plainly.
  void expect_plain(OffloadEngine& engine, std::int64_t first, std::int64_t last, const Loss& loss) {
    for (std::int64_t s = first; s < last; ++s) {
      const StepTensors mine = gradients_of(*model_, &engine, s, loss);
      EXPECT_TRUE(testing_model::same(mine, gradients_of(*plain_, nullptr, s, loss))) << "step " << s;
    }
  }
  /// Each call of `loss` is captured once, and all later steps replay it.
  void expect_one_capture(const Loss& loss, std::int64_t calls = 1) {
    OffloadEngine engine(*model_, options());
    expect_plain(engine, 0, 5, loss);
    EXPECT_EQ(engine.report().captures, 2 * calls);
    EXPECT_EQ(engine.report().replays, 2 * calls);
    EXPECT_EQ(engine.report().eager_calls, calls) << "the sizing pass";
  }
  /// `of(0)` and `of(1)` are two captures, and each replays when it comes again.
  void expect_two_captures(const std::function<at::Tensor(Scaler&, const at::Tensor& x, int which)>& of) {
    OffloadEngine engine(*model_, options());
    const auto with = [&](int which) {
      return [&of, which](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) { return of(model, x, which); };
    };
    expect_plain(engine, 0, 3, with(0));
    EXPECT_EQ(engine.report().captures, 2) << "the same value again";
    expect_plain(engine, 3, 6, with(1));
    EXPECT_EQ(engine.report().captures, 4) << "another value";
    expect_plain(engine, 6, 8, with(0));
    expect_plain(engine, 8, 10, with(1));
    EXPECT_EQ(engine.report().captures, 4) << "both are captured";
    EXPECT_EQ(engine.report().replays, 2);
  }

  [[nodiscard]] at::Tensor data(std::int64_t s, std::int64_t salt) const { return rows(s, device_, salt); }

  std::shared_ptr<Scaler> second_model_, second_plain_;
  c10::Device device_ = find_device("sim");
  std::shared_ptr<Scaler> model_ = std::make_shared<Scaler>(0.7);
  std::shared_ptr<Scaler> plain_ = std::make_shared<Scaler>(0.7);
};

TEST_F(CallArguments, TensorsInTuplesArraysPairsAndMapsAreInputs) {
  expect_one_capture([&](Scaler& model, const at::Tensor& x, std::int64_t s) {
    const std::map<std::string, at::Tensor> by_name{{"a", data(s, 1)}, {"b", data(s, 2)}};
    std::unordered_map<int, std::optional<at::Tensor>> by_number{{7, data(s, 3)}, {3, std::nullopt}, {5, data(s, 4)}};
    const std::vector<std::vector<at::Tensor>> nested{{data(s, 5)}, {}, {data(s, 6), data(s, 7)}};
    return call(
               "all",
               [](Scaler& m, const std::tuple<at::Tensor, double>& scaled, const std::array<at::Tensor, 2>& two,
                  const std::pair<std::string, at::Tensor>& named, const std::map<std::string, at::Tensor>& names,
                  const std::unordered_map<int, std::optional<at::Tensor>>& numbers,
                  const std::vector<std::vector<at::Tensor>>& lists) {
                 at::Tensor h = m.forward(std::get<0>(scaled)) * std::get<1>(scaled) + two[0] * 3 - two[1] * 5;
                 h = h + named.second * (named.first == "named" ? 2 : 1000);
                 h = h + names.at("a") * 7 - names.at("b") * 11;
                 h = h + *numbers.at(7) * 13 - *numbers.at(5) * 17 + (numbers.at(3) ? 1000 : 0);
                 return h + lists[0][0] * 19 - lists[2][0] * 23 + lists[2][1] * 29;
               },
               model, std::make_tuple(x, 0.5), std::array<at::Tensor, 2>{data(s, 8), data(s, 9)},
               std::make_pair(std::string("named"), data(s, 10)), by_name, by_number, nested)
        .square()
        .mean();
  });
}

TEST_F(CallArguments, ResultsMayBeContainers) {
  using Both = std::pair<at::Tensor, std::map<std::string, at::Tensor>>;
  expect_one_capture(
      [](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
        const auto [first, named] = call(
            "pair",
            [](Scaler& m, const at::Tensor& y) {
              return Both{m.forward(y), {{"left", y * 2}, {"right", y * m.weight}}};
            },
            model, x);
        const auto rest = call(
            "array",
            [](const at::Tensor& y) {
              return std::array<std::vector<std::optional<at::Tensor>>, 2>{
                  std::vector<std::optional<at::Tensor>>{y.exp(), std::nullopt, y.sin()}, {}};
            },
            named.at("right"));
        EXPECT_EQ(named.size(), 2U);
        EXPECT_EQ(rest[0].size(), 3U);
        EXPECT_FALSE(rest[0][1].has_value());
        EXPECT_TRUE(rest[1].empty());
        return (first - named.at("left") * *rest[0][0] + *rest[0][2]).square().mean();
      },
      /*calls=*/2);
}

TEST_F(CallArguments, SizesKeysAndEmptyOptionalsAreGuards) {
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    const std::vector<at::Tensor> list(which == 0 ? 2 : 1, x);
    return call(
               "list",
               [](Scaler& m, const std::vector<at::Tensor>& of) {
                 return m.forward(of.front(), of.back()) * double(of.size());
               },
               model, list)
        .sum();
  });
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    const std::map<std::string, at::Tensor> named{{which == 0 ? "plus" : "minus", x}};
    return call(
               "map",
               [](Scaler& m, const std::map<std::string, at::Tensor>& of) {
                 return m.forward(of.begin()->second) * (of.begin()->first == "plus" ? 1 : -1);
               },
               model, named)
        .sum();
  });
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    using Maybe = std::tuple<at::Tensor, std::optional<at::Tensor>>;
    return call(
               "maybe",
               [](Scaler& m, const Maybe& of) {
                 return std::get<1>(of) ? m.forward(std::get<0>(of), *std::get<1>(of)) : m.forward(std::get<0>(of));
               },
               model, Maybe{x, which == 0 ? std::optional<at::Tensor>(x) : std::nullopt})
        .sum();
  });
}

/// A call with one of two values; `use` makes a factor of it.
template <class T, class Use>
auto with_value(T first, T second, Use use) {
  return [values = std::array<T, 2>{std::move(first), std::move(second)}, use](Scaler& model, const at::Tensor& x,
                                                                               int which) {
    return call(
               "value",
               [](Scaler& m, const at::Tensor& y, const T& v, const Use& factor) { return m.scaled(y, factor(v)); },
               model, x, values[static_cast<std::size_t>(which)], use)
        .sum();
  };
}

enum class Mode { twice, thrice };

TEST_F(CallArguments, ValuesAreGuards) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  using testing_model::Shift;
  using testing_model::Slope;
  expect_two_captures(with_value(2, 3, [](int v) { return double(v); }));
  expect_two_captures(with_value(Mode::twice, Mode::thrice, [](Mode v) { return v == Mode::twice ? 2.0 : 3.0; }));
  expect_two_captures(with_value(true, false, [](bool v) { return v ? 2.0 : 3.0; }));
  expect_two_captures(with_value(0.0, -0.0, [](double v) { return std::signbit(v) ? 2.0 : 3.0; }));
  expect_two_captures(with_value(kNan, 2.0, [](double v) { return std::isnan(v) ? 3.0 : v; }));
  expect_two_captures(
      with_value(std::string("a"), std::string("b"), [](const std::string& v) { return v == "a" ? 2. : 3.; }));
  expect_two_captures(
      with_value(at::Scalar(2), at::Scalar(2.0), [](at::Scalar v) { return v.isIntegral(false) ? 2. : 3.; }));
  expect_two_captures(
      with_value(at::Scalar(kNan), at::Scalar(2.0), [](at::Scalar v) { return v.toDouble() == 2. ? 2. : 3.; }));
  expect_two_captures(with_value(c10::Device("cpu"), device_, [](c10::Device v) { return v.is_cpu() ? 2. : 3.; }));
  expect_two_captures(with_value(at::kFloat, at::kLong, [](at::ScalarType v) { return v == at::kLong ? 2. : 3.; }));
  expect_two_captures(with_value(at::dtype(at::kFloat), at::dtype(at::kLong),
                                 [](const at::TensorOptions& v) { return v.dtype() == at::kLong ? 2. : 3.; }));
  expect_two_captures(with_value(std::vector<double>{kNan, 2.}, std::vector<double>{kNan, 3.},
                                 [](const std::vector<double>& v) { return v[1]; }));
  expect_two_captures(with_value(std::vector<bool>{true}, std::vector<bool>{false},
                                 [](const std::vector<bool>& v) { return v[0] ? 2. : 3.; }));
  expect_two_captures(with_value(std::optional<float>(2.F), std::optional<float>(),
                                 [](std::optional<float> v) { return v ? 2. : 3.; }));
  using Table = std::map<std::string, std::pair<int, std::array<float, 2>>>;
  expect_two_captures(with_value(Table{{"a", {1, {2.F, 3.F}}}}, Table{{"a", {1, {2.F, 4.F}}}},
                                 [](const Table& v) { return double(v.at("a").second[1]); }));
  using Either = std::variant<int, std::string>;
  expect_two_captures(with_value(Either(2), Either("2"), [](const Either& v) { return v.index() == 0 ? 2. : 3.; }));
  expect_two_captures(with_value(Slope{2.}, Slope{3.}, [](const Slope& v) { return v.value; }));
  expect_two_captures(with_value(std::vector<Shift>{{2}}, std::vector<Shift>{{3}},
                                 [](const std::vector<Shift>& v) { return double(v[0].value); }));
}

TEST_F(CallArguments, TextIsKeptByItsContent) {
  expect_two_captures([](Scaler& model, const at::Tensor& x, int which) {
    // Gone when the capture runs; in another place each time.
    const auto text =
        std::make_unique<std::string>(which == 0 ? "two, and long enough for the heap" : "three, and as long");
    return call(
               "text", [](Scaler& m, const at::Tensor& y, const char* t) { return m.scaled(y, t[1] == 'w' ? 2 : 3); },
               model, x, text->c_str())
        .sum();
  });
  expect_two_captures([](Scaler& model, const at::Tensor& x, int which) {
    const char* const text = which == 0 ? nullptr : "text";
    const std::vector<std::pair<const char*, int>> nested{{text, which}};
    return call(
               "null",
               [](Scaler& m, const at::Tensor& y, const char* t, const std::vector<std::pair<const char*, int>>& list) {
                 return m.scaled(y, t == nullptr && list[0].first == nullptr ? 2 : 3 + list[0].second);
               },
               model, x, text, nested)
        .sum();
  });
}

// With == a NaN differs from its own copy: a capture would never fit, and each step would make another.
TEST_F(CallArguments, AValueThatDiffersFromItsCopyRunsEagerly) {
  testing_model::ExpectedWarnings warnings;
  OffloadEngine engine(*model_, options());
  expect_plain(engine, 0, 4, [](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call(
               "nan",
               [](Scaler& m, const at::Tensor& y, const testing_model::Slope& slope) {
                 return m.scaled(y, std::isnan(slope.value) ? 2 : 3);
               },
               model, x, testing_model::Slope{std::numeric_limits<double>::quiet_NaN()})
        .sum();
  });
  EXPECT_EQ(engine.report().captures, 0);
  EXPECT_EQ(engine.report().eager_calls, 4);
  const std::vector<std::string> texts = warnings.take();
  ASSERT_EQ(texts.size(), 1U);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "graphed call \"nan\"", texts[0]);
}

at::Tensor times_two(const at::Tensor& x) { return x * 2; }
at::Tensor times_three(const at::Tensor& x) { return x * 3; }

TEST_F(CallArguments, AFunctionIsPartOfTheCall) {
  expect_two_captures([](Scaler& model, const at::Tensor& x, int which) {
    const at::Tensor h = model.forward(x);
    return which == 0 ? call("f", times_two, h).sum() : call("f", &times_three, h).sum();
  });
  expect_two_captures([](Scaler& model, const at::Tensor& x, int which) {
    const at::Tensor h = model.forward(x);
    return which == 0 ? call(
                            "f", [](const at::Tensor& y) { return y * 2; }, h)
                            .sum()
                      : call(
                            "f", [](const at::Tensor& y) { return y * 3; }, h)
                            .sum();
  });
  expect_two_captures([](Scaler& model, const at::Tensor& x, int which) {  // two overloads, the same two tensors
    return which == 0 ? call(
                            "f", [](Scaler& m, const at::Tensor& a, const at::Tensor& b) { return m.forward(a, b); },
                            model, x, x * 2)
                            .sum()
                      : call(
                            "f", [](Scaler& m, const std::pair<at::Tensor, at::Tensor>& p) { return m.forward(p); },
                            model, std::make_pair(x, at::Tensor(x * 2)))
                            .sum();
  });
  expect_one_capture([](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call("scaled", &Scaler::scaled, model, x, 0.5).sum();
  });
}

// A lambda's captured factor was frozen at its first value.
TEST_F(CallArguments, AnOwningFunctionIsComparedByItsBytes) {
  expect_two_captures([](Scaler& model, const at::Tensor& x, int which) {
    const double factor = which == 0 ? 2 : 3;
    return call("owning", owning([factor](Scaler& m, const at::Tensor& y) { return m.scaled(y, factor); }), model, x)
        .sum();
  });
}

TEST_F(CallArguments, AnOwningFunctionThatIsMadeOnceIsCapturedOnce) {
  const auto function =
      owning([factors = std::vector<double>{2, 3}](Scaler& m, const at::Tensor& y) { return m.scaled(y, factors[1]); });
  expect_one_capture(
      [&](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) { return call("owning", function, model, x).sum(); });
}

TEST_F(CallArguments, AnOwningFunctionThatIsMadeAnewEndsAtTheBound) {
  testing_model::ExpectedWarnings warnings;
  OffloadEngine engine(*model_, options().call_options(CallOptions().max_captures(3)));
  expect_plain(engine, 0, 8, [](Scaler& model, const at::Tensor& x, std::int64_t s) {
    const std::vector<double> factors{double(s), 3};
    return call("owning", owning([factors](Scaler& m, const at::Tensor& y) { return m.scaled(y, factors[0]); }), model,
                x)
        .sum();
  });
  EXPECT_EQ(engine.report().captures, 6);
  EXPECT_EQ(warnings.take().size(), 1U);
}

// ---- modules

TEST_F(CallArguments, AModuleArgumentIsWatched) {
  OffloadEngine engine(*model_, options());
  const Loss loss = [](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call(
               "f", [](Scaler& m, const at::Tensor& y) { return m.forward(y); }, model, x)
        .sum();
  };
  expect_plain(engine, 0, 3, loss);
  for (const auto& module : {model_, plain_}) {
    module->weight.set_data(module->weight.detach() * -2);
  }
  expect_plain(engine, 3, 6, loss);
  EXPECT_EQ(engine.report().recaptures, 1);
}

TEST_F(CallArguments, AnotherModuleIsAnotherCapture) {
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    auto& second = &model == model_.get() ? second_model_ : second_plain_;
    if (second == nullptr) {
      second = std::make_shared<Scaler>(-0.3);  // no part of the model that the engine knows
      second->to(device_);
    }
    const auto one = which == 0 ? std::static_pointer_cast<Scaler>(model.shared_from_this()) : second;
    return (call(
                "f", [](const std::shared_ptr<Scaler>& m, const at::Tensor& y) { return m->forward(y); }, one, x) +
            model.weight)
        .sum();
  });
  ASSERT_TRUE(second_model_->weight.grad().defined());
  EXPECT_TRUE(at::equal(second_model_->weight.grad().cpu(), second_plain_->weight.grad().cpu()));
}

// Of no model that the engine knows.
TEST_F(CallArguments, AForeignModuleIsWatchedToo) {
  std::array<std::shared_ptr<Scaler>, 2> foreign{std::make_shared<Scaler>(-0.3), std::make_shared<Scaler>(-0.3)};
  for (const auto& module : foreign) {
    module->to(device_);
  }
  OffloadEngine engine(*model_, options());
  const Loss loss = [&](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call(
               "f", [](Scaler& m, Scaler& other, const at::Tensor& y) { return m.forward(other.forward(y)); }, model,
               *foreign[&model == model_.get() ? 0 : 1], x)
        .sum();
  };
  expect_plain(engine, 0, 3, loss);
  for (const auto& module : foreign) {
    module->weight.set_data(module->weight.detach() * -2);
  }
  expect_plain(engine, 3, 6, loss);
  EXPECT_EQ(engine.report().captures, 4);
  EXPECT_EQ(engine.report().replays, 2);
  EXPECT_TRUE(at::equal(foreign[0]->weight.grad().cpu(), foreign[1]->weight.grad().cpu()));
}

TEST_F(CallArguments, HoldersAndAnyModulesAreModules) {
  torch::manual_seed(3);
  std::array<torch::nn::Linear, 2> linears{torch::nn::Linear(32, 32), torch::nn::Linear(nullptr)};
  linears[1] = std::dynamic_pointer_cast<torch::nn::LinearImpl>(linears[0]->clone());
  std::array<torch::nn::AnyModule, 2> any;
  for (std::size_t i = 0; i < 2; ++i) {
    linears[i]->to(device_);
    any[i] = torch::nn::AnyModule(linears[i]);
  }
  expect_one_capture([&](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    const std::size_t i = &model == model_.get() ? 0 : 1;
    return call(
               "f",
               [](torch::nn::Linear linear, torch::nn::AnyModule again, const std::vector<torch::nn::Linear>& list,
                  const at::Tensor& y) { return linear(y) + again.forward(y) + list[0]->weight.sum(); },
               linears[i], any[i], std::vector<torch::nn::Linear>{linears[i]}, model.forward(x))
        .sum();
  });
  EXPECT_TRUE(at::equal(linears[0]->weight.grad().cpu(), linears[1]->weight.grad().cpu()));
}

TEST_F(CallArguments, AModuleThatNobodyOwnsIsRefused) {
  OffloadEngine engine(*model_, options());
  Scaler local(0.5);
  local.to(device_);
  EXPECT_THROWS(UsageError, "no shared_ptr owns it", {
    const auto step = engine.step();
    (void)call(
        "f", [](Scaler& m, const at::Tensor& y) { return m.forward(y); }, local, rows(0, device_));
  });
  // The engine's own model outlives it, whoever owns it.
  OffloadEngine of_local(local, options());
  for (std::int64_t s = 0; s < 3; ++s) {
    const auto step = of_local.step();
    call(
        "f", [](Scaler& m, const at::Tensor& y) { return m.forward(y); }, local, rows(s, device_))
        .sum()
        .backward();
  }
  EXPECT_EQ(of_local.report().replays, 2);
}

// ---- pointers

// A capture at the next step's begin read a pointer to a local that was gone.
TEST_F(CallArguments, AStayingPointerMayPointToALocal) {
  const std::array<at::Tensor, 2> tables{data(0, 1), data(0, 2)};
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    const auto table = std::make_unique<at::Tensor>(tables[static_cast<std::size_t>(which)]);
    return call("f", &Scaler::with, model, x, stays(table.get())).sum();
  });
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    const at::Tensor* const table = which == 0 ? nullptr : &tables[1];
    return call("f", &Scaler::with, model, x, stays(table)).sum();
  });
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    const auto factors = std::make_unique<std::vector<double>>(2, which == 0 ? 2.0 : 3.0);
    return call(
               "f",
               [](Scaler& m, const at::Tensor& y, const std::vector<double>* of) { return m.scaled(y, of->back()); },
               model, x, stays(factors.get()))
        .sum();
  });
}

TEST_F(CallArguments, AStayingTensorIsReadAnew) {
  at::Tensor table = data(0, 1);
  expect_one_capture([&](Scaler& model, const at::Tensor& x, std::int64_t s) {
    table.copy_(data(s, 1));
    return call("f", &Scaler::with, model, x, stays(&table)).sum();
  });
}

struct Rope {
  at::Tensor table;
};
at::Tensor through_rope(Scaler& m, const at::Tensor& y, const Rope* rope) { return m.forward(y, rope->table); }

TEST_F(CallArguments, ASharedTargetIsKept) {
  // The target goes with the caller's last pointer, before the capture runs: the capture keeps it.
  std::array<std::weak_ptr<Rope>, 2> seen;
  const auto rope = [&] { return std::make_shared<Rope>(Rope{data(0, 1)}); };
  OffloadEngine engine(*model_, options());
  auto held = rope();
  seen[0] = held;
  const Loss loss = [&](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call("f", &through_rope, model, x, stays(held)).sum();
  };
  expect_plain(engine, 0, 1, loss);
  held = rope();
  EXPECT_FALSE(seen[0].expired());
  expect_plain(engine, 1, 5, loss);
  EXPECT_EQ(engine.report().captures, 4) << "of each target";
  static Rope forever;
  forever.table = data(0, 2);
  expect_plain(engine, 5, 8, [](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call("g", &through_rope, model, x, outlives_engine(&forever)).sum();
  });
  EXPECT_EQ(engine.report().captures, 6);
  forever.table = at::Tensor();
}

// ---- what is none

TEST_F(CallArguments, NoModuleAndNoNameAreRefused) {
  const at::Tensor x = rows(0, device_);
  OffloadEngine engine(*model_, options());
  for (const bool in_step : {false, true}) {
    std::optional<Step> step;
    if (in_step) {
      step.emplace(engine.step());
    }
    EXPECT_THROWS(UsageError, "no module", (void)call(static_cast<Scaler*>(nullptr), x));
    EXPECT_THROWS(UsageError, "no module", (void)call(std::shared_ptr<Scaler>(), x));
    EXPECT_THROWS(UsageError, "no module", (void)call(torch::nn::Linear(nullptr), x));
    torch::nn::AnyModule any;
    EXPECT_THROWS(UsageError, "no module", (void)call(any, x));
    EXPECT_THROWS(UsageError, "no name", (void)call(static_cast<const char*>(nullptr), times_two, x));
    EXPECT_THROWS(UsageError, "no name", (void)call("", times_two, x));
  }
}

TEST_F(CallArguments, ACallableIsGivenItsModule) {
  torch::nn::Linear linear(32, 32);
  linear->to(device_);
  OffloadEngine engine(*linear, Options(device_));
  const at::Tensor x = rows(1, device_).requires_grad_(true);
  const auto graphed = make_graphed_callables(
      engine,
      {Callable(
           "first", [](torch::nn::LinearImpl& m, const Tensors& in) { return Tensors{m.forward(in[0])}; }, linear),
       Callable(
           "second", [](torch::nn::Module& m, const Tensors& in) { return Tensors{in[0].matmul(m.parameters()[0])}; },
           linear.ptr())},
      {{x}, {Sample(rows(2, device_).requires_grad_(true))}});
  graphed[1]({graphed[0]({x})[0]})[0].sum().backward();
  const at::Tensor mine = linear->weight.grad().clone();
  linear->zero_grad();
  linear(x).matmul(linear->weight).sum().backward();
  EXPECT_TRUE(at::equal(mine.cpu(), linear->weight.grad().cpu()));
  EXPECT_THROWS(UsageError, "its module is null",
                (void)Callable(
                    "null", [](Scaler& /*m*/, const Tensors& in) { return in; }, std::shared_ptr<Scaler>()));
  EXPECT_THROWS(UsageError, "its module is null", (void)Callable("null", torch::nn::AnyModule()));
  EXPECT_THROWS(UsageError, "its function is null",
                (void)Callable("null", static_cast<Tensors (*)(const Tensors&)>(nullptr)));
  EXPECT_THROWS(UsageError, "count from 0", (void)Sample::output_of(-1));
  EXPECT_THROWS(UsageError, "count from 0", (void)Sample::output_of(0, -1));
}

}  // namespace
}  // namespace sidestream
