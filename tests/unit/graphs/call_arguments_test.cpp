// What a call is given: containers and values are inputs, guards or kept by value, and give plain training's gradients.
#include <array>
#include <cmath>
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

#include "call_arguments_fixture.h"
#include "sidestream/call.h"
#include "sidestream/engine.h"
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

using testing_model::CallArguments;
using testing_model::Scaler;

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

/// Of complex numbers.
struct Rotation : torch::nn::Module {
  explicit Rotation(c10::Device device)
      : weight(
            register_parameter("weight", at::complex(at::linspace(-1, 1, 8), at::linspace(0.5, -0.3, 8)).to(device))) {}
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight;
};

// The tensor that the graph reads is neither.
TEST(LazyArgument, AConjugatedOrNegatedOneReplays) {
  using testing_model::rows;
  const c10::Device device = find_device("sim");
  for (const bool conjugated : {true, false}) {
    Rotation model(device);
    Rotation plain(device);
    OffloadEngine engine(model, Options(device).graph("rotate"));
    for (std::int64_t s = 0; s < 4; ++s) {
      testing_model::expect_same_step(model, &engine, plain, s, [&](Rotation& m) {
        const at::Tensor x =
            at::complex(rows(s, device).narrow(1, 0, 8), rows(s, device, 1).narrow(1, 0, 8)).requires_grad_(true);
        const at::Tensor lazy = conjugated ? x.conj() : at::_neg_view(x);
        const at::Tensor y =
            &m == &plain
                ? m.forward(lazy)
                : call(
                      "rotate", [](Rotation& rotation, const at::Tensor& given) { return rotation.forward(given); }, m,
                      lazy);
        at::real(y * y.conj()).sum().backward();
        return testing_model::values({y.detach(), x.grad().resolve_conj().resolve_neg()});
      });
    }
    EXPECT_EQ(engine.report().captures, 2);
    EXPECT_EQ(engine.report().replays, 2);
    EXPECT_EQ(engine.report().eager_calls, 1) << "the sizing pass";
  }
}

}  // namespace
}  // namespace sidestream
