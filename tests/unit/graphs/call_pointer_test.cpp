// Pointers that a call is given: their targets are kept, or promised to stay.
#include <array>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "call_arguments_fixture.h"
#include "sidestream/call.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {
namespace {

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

}  // namespace
}  // namespace sidestream::testing_model
