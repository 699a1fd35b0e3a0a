// Structs of tensors that a call is given, by value and by pointer: their members are inputs and guards, and give plain training's
// gradients.
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "call_arguments_fixture.h"
#include "expect_throws.h"
#include "sidestream/call.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"

namespace sidestream {
namespace testing_model {

struct RopeBuffers {
  at::Tensor sin, cos;
};
struct ScaledRope {
  RopeBuffers rope;
  const double factor = 1;
  std::string kind;
  std::optional<at::Tensor> mask;
  const char* text = nullptr;
};
struct ShiftedRope : RopeBuffers {
  at::Tensor shift;
};
/// No aggregate: the compiler cannot count its members.
class CachedTable {
 public:
  CachedTable(at::Tensor of, double unlisted) : table(std::move(of)), factor(unlisted) {}
  at::Tensor table;
  double factor;
};

}  // namespace testing_model

using testing_model::CachedTable;
using testing_model::RopeBuffers;
using testing_model::ScaledRope;
using testing_model::ShiftedRope;

template <>
struct ArgumentTraits<RopeBuffers> : Members<&RopeBuffers::sin, &RopeBuffers::cos> {};
template <>
struct ArgumentTraits<ScaledRope>
    : Members<&ScaledRope::rope, &ScaledRope::factor, &ScaledRope::kind, &ScaledRope::mask, &ScaledRope::text> {};
template <>
struct ArgumentTraits<ShiftedRope> : Members<&ShiftedRope::sin, &ShiftedRope::cos, &ShiftedRope::shift> {};
template <>
struct ArgumentTraits<CachedTable> : Members<&CachedTable::table> {};

namespace {

using testing_model::Scaler;

at::Tensor turned(Scaler& m, const at::Tensor& y, const RopeBuffers* rope) {
  return m.forward(y, y * rope->cos) - rope->sin * 3;
}
at::Tensor turned_by_value(Scaler& m, const at::Tensor& y, RopeBuffers rope) { return turned(m, y, &rope); }
at::Tensor scaled_by(Scaler& m, const at::Tensor& y, const ScaledRope& by) {
  const at::Tensor h = turned(m, y, &by.rope) * by.factor * (by.kind == "twice" ? 2 : 3);
  const at::Tensor masked = by.mask ? h * *by.mask : h;
  return by.text == nullptr ? masked : masked * (by.text[0] == 'a' ? 5 : 7);
}

class StructArguments : public testing_model::CallArguments {
 protected:
  [[nodiscard]] RopeBuffers rope(std::int64_t s) const { return {data(s, 1), data(s, 2)}; }
  [[nodiscard]] ScaledRope scaled_rope(std::int64_t s) const { return {rope(s), 0.5, "twice", data(s, 3), "a"}; }
};

TEST_F(StructArguments, TensorMembersAreInputs) {
  expect_one_capture([&](Scaler& model, const at::Tensor& x, std::int64_t s) {
    return call("f", &turned_by_value, model, x, rope(s)).sum();
  });
  expect_one_capture([&](Scaler& model, const at::Tensor& x, std::int64_t s) {
    // Gone when the capture runs; in another place each time.
    const auto local = std::make_unique<RopeBuffers>(rope(s));
    return call("f", &turned, model, x, local.get()).sum();
  });
  expect_one_capture([&](Scaler& model, const at::Tensor& x, std::int64_t s) {
    ShiftedRope shifted{rope(s), data(s, 3)};
    return call(
               "f", [](Scaler& m, const at::Tensor& y, const ShiftedRope* by) { return turned(m, y, by) * by->shift; },
               model, x, &shifted)
        .sum();
  });
}

TEST_F(StructArguments, NestedOnesAndContainersOfThemAreTakenApart) {
  expect_one_capture([&](Scaler& model, const at::Tensor& x, std::int64_t s) {
    return call("f", &scaled_by, model, x, scaled_rope(s)).sum();
  });
  expect_one_capture([&](Scaler& model, const at::Tensor& x, std::int64_t s) {
    const std::vector<RopeBuffers> ropes{rope(s), rope(s + 10)};
    const std::map<std::string, std::pair<RopeBuffers, int>> named{{"a", {rope(s + 20), 5}}};
    return call(
               "f",
               [](Scaler& m, const at::Tensor& y, const std::vector<RopeBuffers>& each,
                  const std::optional<RopeBuffers>& maybe,
                  const std::map<std::string, std::pair<RopeBuffers, int>>& by_name,
                  const std::array<ScaledRope, 1>& one) {
                 const at::Tensor h = turned(m, y, &each[0]) - turned(m, y, &each[1]) * 5 + turned(m, y, &*maybe);
                 return h * turned(m, y, &by_name.at("a").first) * by_name.at("a").second + scaled_by(m, y, one[0]);
               },
               model, x, ropes, std::make_optional(rope(s + 30)), named, std::array<ScaledRope, 1>{scaled_rope(s + 40)})
        .sum();
  });
}

TEST_F(StructArguments, OtherMembersAreGuards) {
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    const ScaledRope by{rope(0), which == 0 ? 0.5 : 0.25, "twice", std::nullopt, nullptr};
    return call("f", &scaled_by, model, x, by).sum();
  });
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    // Gone when the capture runs.
    const std::string text = which == 0 ? "a text that is long enough for the heap" : "c text, as long as the other";
    const auto by =
        std::make_unique<ScaledRope>(ScaledRope{rope(0), 0.5, which == 0 ? "twice" : "thrice", {}, text.c_str()});
    return call(
               "f", [](Scaler& m, const at::Tensor& y, const ScaledRope* of) { return scaled_by(m, y, *of); }, model, x,
               by.get())
        .sum();
  });
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    ScaledRope by = scaled_rope(0);
    by.mask = which == 0 ? by.mask : std::nullopt;
    return call("f", &scaled_by, model, x, by).sum();
  });
}

TEST_F(StructArguments, ANullPointerIsAGuard) {
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    const RopeBuffers local = rope(0);
    return call(
               "f",
               [](Scaler& m, const at::Tensor& y, const RopeBuffers* by) {
                 return by == nullptr ? m.forward(y) : turned(m, y, by);
               },
               model, x, which == 0 ? nullptr : &local)
        .sum();
  });
}

TEST_F(StructArguments, AnUndefinedMemberIsAnotherCapture) {
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    RopeBuffers by = rope(0);
    by.cos = which == 0 ? by.cos : at::Tensor();
    return call(
               "f",
               [](Scaler& m, const at::Tensor& y, const RopeBuffers* of) {
                 return of->cos.defined() ? turned(m, y, of) : m.forward(y, of->sin);
               },
               model, x, &by)
        .sum();
  });
}

// As a trainer does for a longer sequence: the struct stays where it is, its tensors are new ones.
TEST_F(StructArguments, RebuiltBuffersAreReadAnew) {
  OffloadEngine engine(*model_, options());
  RopeBuffers buffers;
  const auto train = [&](std::int64_t first, std::int64_t last, bool longer) {
    for (std::int64_t s = first; s < last; ++s) {
      expect_plain(engine, s, s + 1, [&](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
        return call("f", &turned, model, longer ? at::cat({x, x}) : x, &buffers).sum();
      });
    }
  };
  const auto build = [&](std::int64_t s, bool longer) {
    const RopeBuffers once = rope(s);
    const RopeBuffers again = rope(s + 1);
    buffers = longer ? RopeBuffers{at::cat({once.sin, again.sin}), at::cat({once.cos, again.cos})} : once;
  };
  build(50, false);
  train(0, 3, false);
  EXPECT_EQ(engine.report().captures, 2);
  build(60, true);
  train(3, 6, true);
  EXPECT_EQ(engine.report().captures, 4) << "of the longer sequence";
  build(70, false);
  train(6, 8, false);
  build(80, true);
  train(8, 10, true);
  EXPECT_EQ(engine.report().captures, 4);
  EXPECT_EQ(engine.report().replays, 2);
}

TEST_F(StructArguments, MembersGetTheirGradients) {
  OffloadEngine engine(*model_, options());
  std::array<RopeBuffers, 2> leaves;
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_plain(engine, s, s + 1, [&](Scaler& model, const at::Tensor& x, std::int64_t step) {
      RopeBuffers& leaf = leaves.at(&model == model_.get() ? 0 : 1);
      leaf = {data(step, 1).requires_grad_(true), data(step, 2).requires_grad_(true)};
      const RopeBuffers given{leaf.sin, leaf.cos * 2};
      return call("f", &turned, model, x, &given).square().sum();
    });
    ASSERT_TRUE(leaves[0].sin.grad().defined());
    EXPECT_TRUE(at::equal(leaves[0].sin.grad().cpu(), leaves[1].sin.grad().cpu())) << "step " << s;
    EXPECT_TRUE(at::equal(leaves[0].cos.grad().cpu(), leaves[1].cos.grad().cpu())) << "step " << s;
  }
  EXPECT_EQ(engine.report().captures, 2);
}

TEST_F(StructArguments, TheyAreOffloadedWithTheCall) {
  OffloadEngine engine(*model_, options().offload("**").min_bytes(1));
  expect_plain(engine, 0, 6, [&](Scaler& model, const at::Tensor& x, std::int64_t s) {
    const RopeBuffers by = rope(s);
    at::Tensor h = x;
    for (const char* name : {"f0", "f1", "f2", "f3", "f4", "f5"}) {
      h = call(name, &turned, model, h, &by);
    }
    return h.sum();
  });
  EXPECT_EQ(engine.report().captures, 12);
  EXPECT_GT(engine.report().offloaded_bytes, 0);
}

TEST_F(StructArguments, AnEagerCallGetsTheCallersStruct) {
  const RopeBuffers local = rope(0);
  static const RopeBuffers* seen = nullptr;
  const auto body = [](const at::Tensor& y, const RopeBuffers* by) {
    seen = by;
    return y * by->sin;
  };
  call("f", body, data(0, 3), &local);
  EXPECT_EQ(seen, &local);
}

TEST_F(StructArguments, ACaptureHoldsNoTensorsOfTheCaller) {
  OffloadEngine engine(*model_, options());
  const ScaledRope by{rope(0), 0.5, "twice", data(0, 3), nullptr};
  const CachedTable cache(data(0, 4), 2);
  expect_plain(engine, 0, 4, [&](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call(
               "f",
               [](Scaler& m, const at::Tensor& y, const ScaledRope& of, const CachedTable* with) {
                 return scaled_by(m, y, of) * with->table * with->factor;
               },
               model, x, by, &cache)
        .sum();
  });
  EXPECT_EQ(engine.report().captures, 2);
  for (const at::Tensor& tensor : {by.rope.sin, by.rope.cos, *by.mask, cache.table}) {
    EXPECT_EQ(tensor.use_count(), 2) << "the struct's and the list's";
  }
}

TEST_F(StructArguments, VerificationFindsAMemberThatIsNotListed) {
  OffloadEngine engine(*model_, options().verify_replays(1000));
  CachedTable cache(data(0, 1), 2);
  const Loss loss = [&](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call(
               "f",
               [](Scaler& m, const at::Tensor& y, const CachedTable* of) {
                 return m.forward(y, of->table) * of->factor;
               },
               model, x, &cache)
        .sum();
  };
  expect_plain(engine, 0, 3, loss);
  cache.table = data(1, 1);
  expect_plain(engine, 3, 4, loss);
  EXPECT_EQ(engine.report().captures, 2);
  cache.factor = 3;
  EXPECT_THROWS(VerificationError, "graphed call \"f\": replayed, its output 0 differs",
                gradients_of(*model_, &engine, 4, loss));
}

}  // namespace
}  // namespace sidestream
