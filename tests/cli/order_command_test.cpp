// `sidestream order`: the table, the picture, and what is refused.
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cli/program.h"
#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

std::string order_printed(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"order"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const ProgramResult result = run_program(arguments);
  EXPECT_EQ(result.code, 0) << result.err;
  return result.out;
}

TEST(OrderCommand, ATableHasTheOrderOfEachRankAndWhatItKeeps) {
  EXPECT_EQ(order_printed({"--pp", "2", "--microbatches", "3"}),
            "1F1B: 2 ranks, 3 microbatches\n\n"
            "rank  in flight  order\n"
            "   0          2  F0 F1 B0 F2 B1 B2\n"
            "   1          1  F0 B0 F1 B1 F2 B2\n\n"
            "12 units of time, of which each rank works 9. A forward takes 1, a backward 2.\n"
            "F2 is the forward of microbatch 2, B2 its backward.\n"
            "In flight: the most chunks whose saved tensors a rank keeps at once.\n");
}

TEST(OrderCommand, VirtualStagesAreNamed) {
  const std::string out = order_printed({"--pp", "2", "--vpp", "2", "--microbatches", "2", "--rank", "1"});
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "   1          3  F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1\n", out);
  EXPECT_EQ(out.find("   0   "), std::string::npos) << "rank 1 alone was asked for: " << out;
  EXPECT_PRED_FORMAT2(testing::IsSubstring,
                      "F1.1 is the forward of microbatch 1 in virtual stage 1, B1.1 its backward.\n", out);
}

TEST(OrderCommand, AZeroBubbleOrderKeepsAChunkUntilItsWeightGradients) {
  const std::string out = order_printed({"--pp", "2", "--microbatches", "3", "--kind", "zero-bubble"});
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "   1          2  F0 B0 F1 B1 W0 F2 B2 W1 W2\n", out);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "B2 its backward, W2 its weight gradients.\n", out);
}

TEST(OrderCommand, APictureHasEachStepOfTheRanksThatAreShown) {
  const ScratchFolder folder;
  const std::filesystem::path file = folder.path() / "order.svg";
  (void)order_printed({"--pp", "2", "--microbatches", "3", "--kind", "zero-bubble", "--svg", file.string()});
  const std::string all = ScratchFolder::read(file);
  for (const char* kind : {"forward", "backward", "weights"}) {
    EXPECT_EQ(occurrences(all, std::string("<rect class=\"") + kind + "\""), 2U * 3 + 1)
        << kind << ", and the legend's";
  }
  (void)order_printed({"--pp", "2", "--microbatches", "3", "--rank", "1", "--svg", file.string()});
  const std::string one = ScratchFolder::read(file);
  EXPECT_EQ(occurrences(one, "class=\"number\""), 2U * 3);
  EXPECT_EQ(occurrences(one, ">rank "), 1U);
  EXPECT_EQ(occurrences(one, "weight gradients"), 0U);
}

TEST(OrderCommand, RefusesOrdersThatAreNotDefined) {
  expect_refusal({"order", "--pp", "0"}, 2, "a pipeline has 0 ranks; it must be 1 to");
  expect_refusal({"order", "--microbatches", "many"}, 2, "--microbatches");
  expect_refusal({"order", "--kind", "gpipe"}, 2, "1f1b,interleaved,zero-bubble");
  expect_refusal({"order", "--kind", "1f1b", "--vpp", "2"}, 2, "--vpp is 2: use --kind interleaved");
  expect_refusal({"order", "--kind", "interleaved"}, 2, "--vpp is 1: use --kind 1f1b, or --vpp 2");
  expect_refusal({"order", "--pp", "4", "--rank", "4"}, 2, "rank 4 is not one of the pipeline's ranks, 0 to 3");
  expect_refusal({"order", "--vpp", "2", "--microbatches", "9", "--group", "4"}, 2, "use groups of 5");
  expect_refusal({"order", "--group", "4"}, 2, "leave out --group, or use --vpp 2");
  expect_refusal({"order", "--rank", ""}, 2, "--rank: the value is empty");
  expect_refusal({"order", "--microbatches", "99999999999999999999"}, 2, "99999999999999999999 is beyond 64 bits");
}

TEST(OrderCommand, APictureThatCannotBeWrittenIsRefused) {
  const ScratchFolder folder;
  expect_refusal({"order", "--svg", (folder.path() / "absent" / "order.svg").string()}, 2, "No such file");
  expect_refusal({"order", "--svg", folder.path().string()}, 2, "is a folder");
}

}  // namespace
}  // namespace sidestream::cli
