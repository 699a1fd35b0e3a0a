#include "graphs/sandbox/sandbox.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

namespace sidestream {
namespace {

/// As a held output is given other memory before the next replay overwrites this.
void give_other_memory(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr other = c10::GetCPUAllocator()->allocate(storage.nbytes());
  std::memcpy(other.get(), storage.data(), storage.nbytes());
  const c10::DataPtr before = storage.set_data_ptr(std::move(other));
  std::memset(before.get(), 0x5a, storage.nbytes());
}

TEST(SandboxTest, PutsBackWrittenTensorsAndTheGenerator) {
  const at::Tensor whole = at::arange(8.0F);
  const at::Tensor view = whole.slice(0, 2, 5);
  const at::Tensor before = whole.clone();
  at::Tensor drawn;
  {
    Sandbox sandbox;
    sandbox.keep_state(GeneratorState(at::detail::getDefaultCPUGenerator()));
    sandbox.watch_writes();
    view.add_(1);
    drawn = at::rand({4});
    sandbox.check();
    EXPECT_FALSE(at::equal(whole, before));
  }
  EXPECT_TRUE(at::equal(whole, before));
  EXPECT_TRUE(at::equal(at::rand({4}), drawn));
}

TEST(SandboxTest, PutsBackTheFirstStateOfAGenerator) {
  const at::Generator generator = at::detail::createCPUGenerator(8);
  at::Tensor drawn;
  {
    Sandbox sandbox;
    sandbox.keep_state(GeneratorState(generator));
    drawn = at::rand({4}, generator);
    sandbox.keep_state(GeneratorState(generator));  // the first state counts
  }
  EXPECT_TRUE(at::equal(at::rand({4}, generator), drawn));
}

TEST(SandboxTest, PutsBackInTheMemoryThatAStorageHasAtTheEnd) {
  const at::Tensor tensor = at::arange(8.0F);
  const at::Tensor before = tensor.clone();
  {
    Sandbox sandbox;
    sandbox.watch_writes();
    tensor.add_(1);
    give_other_memory(tensor);
    tensor.add_(1);
  }
  EXPECT_TRUE(at::equal(tensor, before));
}

TEST(SandboxTest, ChangesNoVersionCounter) {
  const at::Tensor tensor = at::arange(8.0F);
  std::uint32_t version = 0;
  {
    Sandbox sandbox;
    sandbox.keep_buffers({tensor});
    tensor.add_(1);
    version = tensor._version();
  }
  EXPECT_EQ(tensor._version(), version);
}

TEST(SandboxTest, KeepsNoWrittenTensorAlive) {
  at::Tensor tensor = at::arange(8.0F);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage = tensor.storage().getWeakStorageImpl();
  Sandbox sandbox;
  sandbox.watch_writes();
  tensor.add_(1);
  tensor.reset();
  EXPECT_TRUE(storage.expired());
}

TEST(SandboxTest, DoesNotChangeWhatTheRunMade) {
  at::Tensor made;
  {
    Sandbox sandbox;
    sandbox.watch_writes();
    made = at::arange(8.0F);
    made.add_(1);
  }
  EXPECT_TRUE(at::equal(made, at::arange(8.0F).add(1)));
}

TEST(SandboxTest, GivesABufferItsStorageAgain) {
  const at::Tensor buffer = at::arange(8.0F);
  const at::Tensor before = buffer.clone();
  const void* const address = buffer.const_data_ptr();
  {
    Sandbox sandbox;
    sandbox.keep_buffers({buffer, at::Tensor()});
    buffer.add_(1);
    buffer.set_data(buffer.add(1));
  }
  EXPECT_TRUE(at::equal(buffer, before));
  EXPECT_EQ(buffer.const_data_ptr(), address);
}

TEST(SandboxTest, HidesGradientsAndRemovesNewOnes) {
  at::Tensor with = at::zeros({2}).requires_grad_();
  at::Tensor without = at::zeros({2}).requires_grad_();
  const at::Tensor gradient = at::ones({2});
  with.mutable_grad() = gradient;
  {
    Sandbox sandbox;
    sandbox.hide_gradients({with, without, with});  // a shared parameter is there twice
    EXPECT_FALSE(with.grad().defined());
    with.add(without).sum().backward();
    EXPECT_TRUE(with.grad().defined());
  }
  EXPECT_TRUE(with.grad().is_same(gradient));
  EXPECT_TRUE(at::equal(gradient, at::ones({2})));
  EXPECT_FALSE(without.grad().defined());
}

TEST(SandboxTest, HidesHooksAndAccumulators) {
  at::Tensor leaf = at::zeros({2}).requires_grad_();
  int calls = 0;
  leaf.register_hook([&](const at::Tensor& /*grad*/) { ++calls; });
  const at::Tensor loss = leaf.sum();  // holds the accumulator
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  {
    Sandbox sandbox;
    sandbox.hide_hooks_and_accumulators({leaf, leaf});
    EXPECT_EQ(torch::autograd::impl::try_get_grad_accumulator(leaf), nullptr);
    (void)torch::autograd::grad({leaf.sum()}, {leaf});
    EXPECT_EQ(calls, 0);
  }
  EXPECT_EQ(torch::autograd::impl::try_get_grad_accumulator(leaf), accumulator);
  (void)torch::autograd::grad({loss}, {leaf});
  EXPECT_EQ(calls, 1);
}

TEST(SandboxTest, PutsBackBeforeItsEndIfAsked) {
  const at::Tensor tensor = at::arange(8.0F);
  Sandbox sandbox;
  sandbox.keep_bytes(tensor.storage());
  tensor.add_(1);
  sandbox.put_back();
  EXPECT_TRUE(at::equal(tensor, at::arange(8.0F)));
  tensor.add_(1);
  sandbox.put_back();
  EXPECT_TRUE(at::equal(tensor, at::arange(8.0F).add(1))) << "held nothing any more";
}

}  // namespace
}  // namespace sidestream
