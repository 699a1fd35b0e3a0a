// How the arguments of a call stand to each other, found for one and for all of them.
#include "graphs/guards/input_facts.h"

#include <random>
#include <vector>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace sidestream {
namespace {

/// Some are new, some the same as an earlier one, or a view of it, or undefined.
std::vector<at::Tensor> arguments(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<at::Tensor> tensors;
  while (tensors.size() < count) {
    const auto kind = random() % 8;
    const at::Tensor earlier = tensors.empty() ? at::Tensor() : tensors[random() % tensors.size()];
    if (kind == 0) {
      tensors.emplace_back();
    } else if (kind == 1) {
      tensors.push_back(earlier);
    } else if (kind == 2 && earlier.defined()) {
      tensors.push_back(earlier.view({-1}));
    } else {
      tensors.push_back(at::ones({2}));
    }
  }
  return tensors;
}

TEST(AliasesInTurnTest, TheyAreThoseThatEachArgumentHasByItself) {
  for (const std::size_t count : {1U, 7U, 8U, 9U, 100U, 256U, 257U, 300U}) {
    for (std::uint32_t seed = 0; seed < 5; ++seed) {
      const std::vector<at::Tensor> tensors = arguments(count, seed);
      InputAliases::InTurn in_turn(tensors);
      for (std::size_t i = 0; i < count; ++i) {
        const InputAliases expected = InputAliases::of(tensors, i);
        const InputAliases found = in_turn.next();
        ASSERT_EQ(found.same_as, expected.same_as) << count << " arguments, seed " << seed << ", argument " << i;
        ASSERT_EQ(found.shares_with, expected.shares_with)
            << count << " arguments, seed " << seed << ", argument " << i;
      }
    }
  }
}

}  // namespace
}  // namespace sidestream
