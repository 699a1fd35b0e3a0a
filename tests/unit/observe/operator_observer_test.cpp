#include "observe/operator_observer.h"
#include "observe/external_reads.h"

#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/add.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/split.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

namespace sidestream {
namespace {

struct Seen {
  std::string name;
  std::vector<const c10::StorageImpl*> reads, writes, outputs;
};

std::vector<const c10::StorageImpl*> storages(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<const c10::StorageImpl*> out;
  for (const at::Tensor& tensor : tensors) {
    out.push_back(tensor.storage().unsafeGetStorageImpl());
  }
  return out;
}

const c10::StorageImpl* storage(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

std::function<void(const OperatorAccess&)> into(std::vector<Seen>& seen) {
  return [&seen](const OperatorAccess& access) {
    seen.push_back({access.name, storages(access.reads), storages(access.writes), storages(access.outputs)});
  };
}

const Seen* find(const std::vector<Seen>& seen, const std::string& name) {
  const auto at = std::find_if(seen.begin(), seen.end(), [&](const Seen& one) { return one.name == name; });
  return at == seen.end() ? nullptr : &*at;
}

using Storages = std::vector<const c10::StorageImpl*>;

TEST(OperatorObserver, ReportsReadsWritesAndOutputs) {
  const at::Tensor a = at::randn({4, 4}), b = at::randn({4, 4});
  at::Tensor c = at::zeros({4, 4}), d;
  std::vector<Seen> seen;
  {
    const OperatorObserverGuard guard(into(seen));
    d = at::mm(a, b);
    at::mm_out(c, a, b);
    c.add_(a);
  }
  (void)at::mm(a, b);
  // mm asks its arguments for their conjugate bit by an operator.
  std::erase_if(seen, [](const Seen& one) { return one.name == "aten::resolve_conj"; });
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[0].name, "aten::mm");
  EXPECT_EQ(seen[0].reads, (Storages{storage(a), storage(b)}));
  EXPECT_TRUE(seen[0].writes.empty());
  EXPECT_EQ(seen[0].outputs, (Storages{storage(d)}));
  EXPECT_EQ(seen[1].writes, (Storages{storage(c)}));
  EXPECT_EQ(seen[2].name, "aten::add_");
  EXPECT_EQ(seen[2].writes, (Storages{storage(c)}));
  EXPECT_EQ(seen[2].outputs, (Storages{storage(c)}));
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
}

TEST(OperatorObserver, ListsOptionalsAndUnmarkedWrites) {
  const at::Tensor a = at::randn({4, 2}), b = at::randn({4, 2}), mean = at::zeros({2}), variance = at::ones({2});
  std::vector<Seen> seen;
  {
    const OperatorObserverGuard guard(into(seen));
    (void)at::cat({a, b});
    (void)a.split(2);
    at::_foreach_add_({mean, variance}, 1);
    (void)at::batch_norm(a, {}, {}, mean, variance, /*training=*/true, 0.1, 1e-5, false);
    (void)at::batch_norm(a, {}, {}, mean, variance, /*training=*/false, 0.1, 1e-5, false);
  }
  const Seen* cat = find(seen, "aten::cat");
  ASSERT_NE(cat, nullptr);
  EXPECT_EQ(cat->reads, (Storages{storage(a), storage(b)}));
  const Seen* split = find(seen, "aten::split");
  ASSERT_NE(split, nullptr);
  EXPECT_EQ(split->outputs, (Storages{storage(a), storage(a)}));
  const Seen* foreach_add = find(seen, "aten::_foreach_add_");
  ASSERT_NE(foreach_add, nullptr);
  EXPECT_EQ(foreach_add->writes, (Storages{storage(mean), storage(variance)}));
  const Seen* norm = find(seen, "aten::native_batch_norm");
  ASSERT_NE(norm, nullptr);
  EXPECT_EQ(norm->writes, (Storages{storage(mean), storage(variance)}));
  EXPECT_TRUE(std::find_if(seen.rbegin(), seen.rend(), [](const Seen& one) {
                return one.name == "aten::native_batch_norm";
              })->writes.empty());
}

TEST(OperatorObserver, TellsWhatCopiesAndShapesAreGiven) {
  at::Tensor a = at::randn({4, 2});
  const at::Tensor b = at::randn({4, 2});
  std::map<std::string, std::pair<bool, bool>> seen;  // non_blocking, only_shape
  {
    const OperatorObserverGuard guard([&](const OperatorAccess& access) {
      seen[access.name] = {access.non_blocking, access.only_shape};
    });
    a.copy_(b, /*non_blocking=*/true);
    a.add_(b);
    a.t_();
    {
      const UnobservedGuard unobserved;
      a.mul_(2);
    }
  }
  EXPECT_EQ(seen["aten::copy_"], std::make_pair(true, false));
  EXPECT_EQ(seen["aten::add_"], std::make_pair(false, false));
  EXPECT_EQ(seen["aten::t_"], std::make_pair(false, true));
  EXPECT_EQ(seen.count("aten::mul_"), 0U);
  EXPECT_FALSE(OperatorObserverGuard::observes_this_thread());
}

TEST(OperatorObserver, FollowsBackwardAndOnlyItsThread) {
  const at::Tensor x = at::randn({4, 4}).requires_grad_(true), w = at::randn({4, 4});
  std::vector<Seen> seen;
  {
    const OperatorObserverGuard guard(into(seen));
    std::thread([&] { (void)at::cat({w, w}); }).join();
    const at::Tensor y = at::mm(x, w).sum();
    seen.clear();
    torch::autograd::grad({y}, {x});
  }
  EXPECT_EQ(find(seen, "aten::cat"), nullptr);
  const Seen* mm = find(seen, "aten::mm");
  ASSERT_NE(mm, nullptr) << "the backward of mm is an mm with the weight";
  EXPECT_NE(std::find(mm->reads.begin(), mm->reads.end(), storage(w)), mm->reads.end());
}

// The CPU has no device thread; handing over the thread's state is what autograd does when there is one.
TEST(OperatorObserver, TravelsWithThreadLocalState) {
  const at::Tensor a = at::randn({2, 2});
  std::vector<Seen> seen;
  std::function<void()> later;
  {
    const OperatorObserverGuard guard(into(seen));
    later = at::wrapPropagateTLSState([&] { (void)at::cat({a, a}); });
    std::thread([&] { later(); }).join();
    EXPECT_NE(find(seen, "aten::cat"), nullptr);
    seen.clear();
  }
  std::thread([&] { later(); }).join();
  EXPECT_TRUE(seen.empty()) << "observed after the guard's end";
}

TEST(OperatorObserver, InnermostObservesAndObserversMayCompute) {
  const at::Tensor a = at::randn({2, 2});
  int outer = 0, inner = 0;
  {
    const OperatorObserverGuard first([&](const OperatorAccess&) {
      ++outer;
      (void)a.add(1);
    });
    (void)a.mul(2);
    const int before = outer;
    {
      const OperatorObserverGuard second([&](const OperatorAccess&) { ++inner; });
      (void)a.mul(2);
    }
    EXPECT_EQ(outer, before);
    EXPECT_EQ(inner, before);
    (void)a.mul(2);
    EXPECT_EQ(outer, 2 * before);
  }
  EXPECT_GT(inner, 0);
}

TEST(OperatorObserver, HearsOfAnOperatorBeforeItWrites) {
  at::Tensor a = at::zeros({2});
  std::vector<float> before;
  std::vector<float> after;
  {
    const OperatorObserverGuard guard(
        [&](const OperatorAccess& access) {
          if (!access.nested && std::string(access.name) == "aten::add_") {
            after.push_back(a.const_data_ptr<float>()[0]);
          }
        },
        [&](const OperatorAccess& access) {
          if (!access.nested && std::string(access.name) == "aten::add_") {
            EXPECT_EQ(storages(access.writes), Storages{storage(a)});
            EXPECT_TRUE(access.outputs.empty());
            before.push_back(a.const_data_ptr<float>()[0]);
          }
        });
    a.add_(1).add_(2);
    guard.rethrow();
  }
  EXPECT_EQ(before, (std::vector<float>{0, 1}));
  EXPECT_EQ(after, (std::vector<float>{1, 3}));
}

TEST(OperatorObserver, TheGuardAroundHearsTooWhereItIsSaid) {
  const at::Tensor a = at::ones({2});
  std::size_t heard = 0;
  const OperatorObserverGuard around([&](const OperatorAccess&) { ++heard; });
  {
    const OperatorObserverGuard alone([](const OperatorAccess&) {});
    (void)a.mul(2);
  }
  EXPECT_EQ(heard, 0U);
  const OperatorObserverGuard both([](const OperatorAccess&) {}, {}, OperatorObserverGuard::Outer::hears_too);
  (void)a.mul(2);
  EXPECT_GT(heard, 0U);
}

TEST(OperatorObserver, ErrorsAreKeptAndTheStateComesBack) {
  const at::Tensor a = at::randn({2, 2});
  {
    const OperatorObserverGuard guard([](const OperatorAccess&) { throw std::logic_error("observer"); });
    EXPECT_NO_THROW(guard.rethrow());
    (void)a.mul(a);
    EXPECT_THROW(guard.rethrow(), std::logic_error);
  }
  std::vector<Seen> seen;
  EXPECT_THROW(
      {
        const OperatorObserverGuard guard(into(seen));
        (void)at::mm(a, at::ones({3, 3}));
      },
      c10::Error);
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
}

TEST(OperatorObserver, TellsBeforeAnOperatorWrites) {
  const at::Tensor counter = at::zeros({1});
  std::vector<float> before;
  std::vector<float> after;
  const auto note = [&](std::vector<float>& values) {
    return [&](const OperatorAccess& access) {
      if (!access.nested && !access.writes.empty() && access.writes.front().is_same(counter)) {
        EXPECT_EQ(access.outputs.empty(), &values == &before);
        values.push_back(*counter.const_data_ptr<float>());
      }
    };
  };
  const OperatorObserverGuard guard(note(after), note(before));
  counter.add_(1);
  counter.mul_(3);
  EXPECT_EQ(before, (std::vector<float>{0, 1}));
  EXPECT_EQ(after, (std::vector<float>{1, 3}));
}

TEST(OperatorObserver, TheGuardAroundHearsWhereItIsToldTo) {
  for (const auto outer : {OperatorObserverGuard::Outer::hears_nothing, OperatorObserverGuard::Outer::hears_too}) {
    int heard = 0;
    int seen = 0;
    const OperatorObserverGuard around([&](const OperatorAccess&) { ++heard; });
    {
      const OperatorObserverGuard inner([&](const OperatorAccess&) { ++seen; }, {}, outer);
      (void)at::ones({2});
    }
    EXPECT_GT(seen, 0);
    EXPECT_EQ(heard, outer == OperatorObserverGuard::Outer::hears_too ? seen : 0);
  }
}

TEST(OperatorObserver, GuardsThatEndOutOfOrderLeaveTheOthersHearing) {
  std::vector<Seen> outer;
  std::vector<Seen> inner;
  std::vector<Seen> next;
  const at::Tensor a = at::ones({2});
  {
    auto around = std::make_unique<OperatorObserverGuard>(into(outer));
    auto inside = std::make_unique<OperatorObserverGuard>(into(inner));
    around.reset();
    (void)a.mul(2);
    EXPECT_EQ(outer.size(), 0U);
    EXPECT_NE(find(inner, "aten::mul"), nullptr);
    inside.reset();
  }
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  EXPECT_FALSE(OperatorObserverGuard::observes_this_thread());
  const OperatorObserverGuard guard(into(next));
  (void)a.mul(2);
  EXPECT_NE(find(next, "aten::mul"), nullptr);
}

TEST(OperatorObserver, AGuardThatEndsOnAnotherThreadHidesNothing) {
  std::vector<Seen> outer;
  std::vector<Seen> inner;
  const at::Tensor a = at::ones({2});
  {
    const OperatorObserverGuard around(into(outer));
    auto inside = std::make_unique<OperatorObserverGuard>(into(inner));
    std::thread([&] { inside.reset(); }).join();
    (void)a.mul(2);
    EXPECT_EQ(inner.size(), 0U);
    EXPECT_NE(find(outer, "aten::mul"), nullptr);
  }
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  EXPECT_FALSE(OperatorObserverGuard::observes_this_thread());
}

TEST(OperatorObserver, KnowsWhatDraws) {
  std::vector<std::string> random;
  const OperatorObserverGuard guard([&](const OperatorAccess& access) {
    if (access.random) {
      random.emplace_back(access.name);
    }
  });
  (void)at::ones({2}).mul(2);
  (void)at::rand({2});
  at::zeros({2}).normal_();
  EXPECT_TRUE(std::find(random.begin(), random.end(), "aten::rand") != random.end());
  EXPECT_TRUE(std::find(random.begin(), random.end(), "aten::normal_") != random.end());
  EXPECT_TRUE(std::find(random.begin(), random.end(), "aten::mul") == random.end());
}

TEST(ExternalReads, FindsWhatWasNotMadeInside) {
  const at::Tensor x = at::randn({4, 8}), w = at::randn({8, 8}), b = at::randn({8}), rope = at::randn({8});
  at::Tensor counter = at::zeros({1});
  ExternalReads external;
  {
    const OperatorObserverGuard guard([&](const OperatorAccess& access) { external.observe(access); });
    at::Tensor h = at::linear(x, w, b);
    h = h.mul(rope.unsqueeze(0)).mul(2.0);
    const at::Tensor mask = at::ones({4, 8});
    h = h.add(mask).view({8, 4}).t();
    counter.add_(1);
    h.mul_(0.5);
  }
  std::vector<const c10::StorageImpl*> found;
  for (const ExternalStorage& one : external.externals()) {
    found.push_back(one.storage.unsafeGetStorageImpl());
  }
  std::vector<const c10::StorageImpl*> expected{storage(x), storage(w), storage(b), storage(rope), storage(counter)};
  std::sort(found.begin(), found.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(found, expected);
  const ExternalStorage* weight = external.find(storage(w));
  ASSERT_NE(weight, nullptr);
  EXPECT_EQ(weight->bytes, 256U);
  EXPECT_FALSE(weight->written);
  EXPECT_TRUE(external.find(storage(counter))->written);
}

TEST(ExternalReads, KeepsExternalsAlive) {
  ExternalReads external;
  c10::weak_intrusive_ptr<c10::StorageImpl> weak = at::Tensor(at::ones({1})).storage().getWeakStorageImpl();
  {
    const at::Tensor lost = at::randn({16});
    weak = lost.storage().getWeakStorageImpl();
    const OperatorObserverGuard guard([&](const OperatorAccess& access) { external.observe(access); });
    (void)lost.mul(2);
  }
  EXPECT_FALSE(weak.expired());
  (void)external.take();
  EXPECT_TRUE(weak.expired());
}

// LibTorch's data() throws for it. The operator that reads it may be one of several, and the reads of the others are known.
TEST(ExternalReads, FindsAStorageThatWasReleased) {
  const at::Tensor kept = at::randn({8}), released = at::randn({8});
  released.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, at::kCPU));
  released.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_("released");
  ExternalReads external;
  {
    const OperatorObserverGuard guard([&](const OperatorAccess& access) { external.observe(access); },
                                      [&](const OperatorAccess& access) { external.observe_before(access); });
    EXPECT_THROW(released.mul(kept), c10::Error);
  }
  ASSERT_EQ(external.externals().size(), 2U);
  ASSERT_NE(external.find(storage(released)), nullptr);
  ASSERT_NE(external.find(storage(kept)), nullptr);
}

// An operator of the user's own that holds a table: only what it calls inside shows it.
TEST(ExternalReads, FindsWhatAnOperatorHoldsItself) {
  static const at::Tensor& table = *new at::Tensor(at::randn({8}));  // outlives what LibTorch keeps of a thread
  torch::Library library(torch::Library::DEF, "sidestream_test", std::nullopt, __FILE__, __LINE__);
  library.def("rotate(Tensor x) -> Tensor", [](const at::Tensor& x) { return x.mul(table); });
  const auto rotate = c10::Dispatcher::singleton()
                          .findSchemaOrThrow("sidestream_test::rotate", "")
                          .typed<at::Tensor(const at::Tensor&)>();
  const at::Tensor x = at::randn({8});
  ExternalReads external;
  {
    const OperatorObserverGuard guard([&](const OperatorAccess& access) { external.observe(access); });
    const at::Tensor y = rotate.call(x).mul(2);
  }
  EXPECT_EQ(external.externals().size(), 2U);
  EXPECT_NE(external.find(storage(x)), nullptr);
  EXPECT_NE(external.find(storage(table)), nullptr);
}

TEST(ExternalReads, WhatWasMadeIsNotKept) {
  ExternalReads external;
  const OperatorObserverGuard guard([&](const OperatorAccess& access) { external.observe(access); });
  const at::Tensor a = at::ones({4});
  c10::weak_intrusive_ptr<c10::StorageImpl> weak = a.storage().getWeakStorageImpl();
  {
    const at::Tensor made = a.add(1);
    weak = made.storage().getWeakStorageImpl();
    (void)made.mul(2);
  }
  EXPECT_TRUE(weak.expired());
  EXPECT_TRUE(external.externals().empty()) << "though it was read";
}

}  // namespace
// A tensor without memory of its own: what is read are its parts.
TEST(ExternalReads, FindsThePartsOfASparseTensor) {
  const at::Tensor indices = at::arange(4).expand({2, 4}).contiguous(), values = at::randn({4});
  const at::Tensor outside = at::_sparse_coo_tensor_unsafe(indices, values, {4, 4});
  const at::Tensor dense = at::randn({4, 4});
  ExternalReads external;
  at::Tensor inside;
  {
    const OperatorObserverGuard guard([&](const OperatorAccess& access) { external.observe(access); });
    inside = dense.to_sparse();
    (void)at::mm(inside, dense);
    EXPECT_EQ(external.externals().size(), 1U) << "what was made inside is not external";
    (void)at::mm(outside, dense);
  }
  EXPECT_EQ(external.externals().size(), 3U);
  EXPECT_NE(external.find(storage(dense)), nullptr);
  EXPECT_NE(external.find(storage(indices)), nullptr);
  EXPECT_NE(external.find(storage(values)), nullptr);
}

TEST(ExternalReads, AnOperatorMakesThePartsOfItsSparseResult) {
  const at::Tensor result[] = {at::ones({4, 4}).to_sparse()};
  ExternalReads external;
  external.observe({.name = "kernel", .reads = {}, .writes = {}, .outputs = result});
  external.observe({.name = "reader", .reads = result, .writes = {}, .outputs = {}});
  EXPECT_TRUE(external.externals().empty());
  const at::Tensor outside[] = {at::ones({4, 4}).to_sparse()};
  const at::Tensor view[] = {outside[0].detach()};
  external.observe({.name = "view", .reads = outside, .writes = {}, .outputs = view, .nested = true});
  external.observe({.name = "outer", .reads = {}, .writes = {}, .outputs = {}});
  EXPECT_EQ(external.externals().size(), 2U) << "a view makes no memory";
}

}  // namespace sidestream
