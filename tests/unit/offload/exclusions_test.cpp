#include "offload/exclusions.h"

#include <string>

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "offload/exclusion_tallies.h"

namespace sidestream {
namespace {

const c10::Device cpu(c10::DeviceType::CPU);

at::Tensor tensor(std::int64_t floats) { return at::randn({floats}); }

TEST(Exclusions, ParametersAndTheirViewsByStorage) {
  Exclusions exclusions(cpu, 0);
  const at::Tensor weight = at::randn({8, 8}).requires_grad_(true);
  const at::Tensor buffer = tensor(8);
  EXPECT_EQ(exclusions.classify(weight.detach().t()), Exclusion::none);
  exclusions.set_parameters({weight, buffer});
  EXPECT_EQ(exclusions.classify(weight.detach().t()), Exclusion::parameter);
  EXPECT_EQ(exclusions.classify(weight.detach().slice(0, 2, 4)), Exclusion::parameter);
  EXPECT_EQ(exclusions.classify(buffer.unsqueeze(0)), Exclusion::parameter);
  EXPECT_EQ(exclusions.classify(weight.detach().clone()), Exclusion::none);
}

TEST(Exclusions, BytesElsewhereAreNoBytesOfTheDevice) {
  Exclusions exclusions(cpu, 0);
  const at::Tensor elsewhere = at::empty({64}, c10::Device(c10::DeviceType::Meta)).requires_grad_(true);
  exclusions.set_parameters({tensor(16).requires_grad_(true)});
  const std::uint64_t weights = exclusions.registered_bytes();
  const std::int64_t gradients = exclusions.gradient_bytes();
  EXPECT_EQ(weights, 64U);
  exclusions.set_parameters({tensor(16).requires_grad_(true), elsewhere});
  EXPECT_EQ(exclusions.registered_bytes(), weights);
  EXPECT_EQ(exclusions.gradient_bytes(), gradients);
}

TEST(Exclusions, ParameterWhoseStorageIsRelocatedIsNoticed) {
  Exclusions exclusions(cpu, 0);
  const at::Tensor weight = at::randn({8, 8}).requires_grad_(true);
  exclusions.set_parameters({weight});
  EXPECT_FALSE(exclusions.refresh_parameters());
  const at::Tensor old = weight.detach();
  weight.set_data(at::randn({8, 8}));
  EXPECT_EQ(exclusions.classify(weight.detach()), Exclusion::none);
  EXPECT_TRUE(exclusions.refresh_parameters());
  EXPECT_EQ(exclusions.classify(weight.detach()), Exclusion::parameter);
  EXPECT_EQ(exclusions.classify(old), Exclusion::none);
}

TEST(Exclusions, LeavesThatRequireGrad) {
  Exclusions exclusions(cpu, 0);
  const at::Tensor leaf = tensor(64).requires_grad_(true);
  EXPECT_EQ(exclusions.classify(leaf), Exclusion::parameter);
  EXPECT_EQ(exclusions.classify(leaf.detach()), Exclusion::none);
}

TEST(Exclusions, SmallIsByTheWholeStorage) {
  Exclusions exclusions(cpu, 1024);
  EXPECT_EQ(exclusions.classify(tensor(255)), Exclusion::small);
  EXPECT_EQ(exclusions.classify(tensor(256)), Exclusion::none);
  EXPECT_EQ(exclusions.classify(tensor(256).slice(0, 0, 1)), Exclusion::none);
  EXPECT_EQ(Exclusions(cpu, 0).classify(at::empty({0})), Exclusion::small);
}

TEST(Exclusions, MarksFollowTheStorageAndDieWithIt) {
  Exclusions exclusions(cpu, 0);
  at::Tensor marked = tensor(64);
  exclusions.mark(marked.slice(0, 8));
  EXPECT_EQ(exclusions.classify(marked.detach()), Exclusion::marked);
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(exclusions.classify(tensor(64)), Exclusion::none);
    exclusions.mark(tensor(64));
    EXPECT_EQ(exclusions.classify(tensor(64)), Exclusion::none) << "a recycled address was mistaken for the marked one";
  }
  EXPECT_EQ(exclusions.classify(marked), Exclusion::marked) << "a live mark was swept";
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage = marked.storage().getWeakStorageImpl();
  marked.reset();
  EXPECT_TRUE(storage.expired()) << "a mark kept the tensor's memory";
}

TEST(Exclusions, OtherDeviceCastAndStaticInput) {
  Exclusions exclusions(cpu, 0);
  EXPECT_EQ(exclusions.classify(at::empty({64}, at::TensorOptions().device(c10::DeviceType::Meta))),
            Exclusion::other_device);
  const at::Tensor weight = tensor(64).requires_grad_(true), input = tensor(64);
  EXPECT_EQ(exclusions.classify(weight.to(at::kBFloat16).t()), Exclusion::weight_cast);
  exclusions.add_static_input(input);
  EXPECT_EQ(exclusions.classify(input.detach()), Exclusion::static_input);
  exclusions.remove_static_inputs();
  EXPECT_EQ(exclusions.classify(input), Exclusion::none);
}

TEST(Exclusions, UnsupportedTensors) {
  Exclusions exclusions(cpu, 0);
  EXPECT_EQ(exclusions.classify(at::Tensor()), Exclusion::unsupported);
  EXPECT_EQ(exclusions.classify(at::ones({4, 4}).to_sparse()), Exclusion::unsupported);
}

TEST(Exclusions, FirstReasonWins) {
  Exclusions exclusions(cpu, 1 << 20);
  const at::Tensor weight = tensor(64).requires_grad_(true);
  const at::Tensor all = weight.to(at::kBFloat16);
  EXPECT_EQ(exclusions.classify(all), Exclusion::weight_cast);
  exclusions.mark(all);
  EXPECT_EQ(exclusions.classify(all), Exclusion::marked);
  exclusions.add_static_input(all);
  EXPECT_EQ(exclusions.classify(all), Exclusion::static_input);
  exclusions.set_parameters({all});
  EXPECT_EQ(exclusions.classify(all), Exclusion::parameter);
}

TEST(ExclusionTallies, CountTensorsAndTheirStorages) {
  ExclusionTallies tallies;
  EXPECT_TRUE(tallies.profile().empty());
  const at::Tensor marked = tensor(512);
  tallies.count(Exclusion::small, tensor(10));
  tallies.count(Exclusion::marked, marked.slice(0, 0, 4));
  tallies.count(Exclusion::marked, marked);
  tallies.count(Exclusion::unsupported, at::ones({4, 4}).to_mkldnn());
  tallies.count(Exclusion::unsupported, at::Tensor(at::ones({4, 4}).to_sparse()));
  EXPECT_EQ(tallies.bytes(Exclusion::small), 40U);
  std::string all;
  for (const StayingTensors& of_reason : tallies.profile()) {
    all += of_reason.reason + " " + std::to_string(of_reason.tensors) + " " + std::to_string(of_reason.bytes) + "\n";
  }
  EXPECT_EQ(all, "small 1 40\nmarked 2 4096\nunsupported (Sparse) 1 0\nunsupported (Mkldnn) 1 0\n");
}

}  // namespace
}  // namespace sidestream
