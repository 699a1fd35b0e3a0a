// Conformance cases of orders of chunks with options of offload: docs/conformance.md lists all cases. pipeline_rank_test.cpp has those that
// need no options.
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/testing/simulator.h"
#include "unit/graphs/called_stack.h"
#include "unit/graphs/rank_pipeline.h"
#include "unit/graphs/rank_programs.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

/// The first of two ranks with two parts: interleaved.
RankProgram interleaved(std::size_t layers, std::vector<std::size_t> microbatches = {4, 4, 4}) {
  return {"interleaved", {2, 0, 2}, layers, std::move(microbatches)};
}

/// What the layers of a rank are, and which eager groups wait for a graph.
struct Form {
  std::string name, graph, delay;
};
std::ostream& operator<<(std::ostream& out, const Form& form) { return out << form.name; }

class OffloadConformance : public testing::Test {
 protected:
  [[nodiscard]] Options options(const Form& form = {}) const {
    Options all = Options(device_)
                      .min_bytes(1024)
                      .offload("layers.*.*")
                      .check_steps(8)
                      .call_options(CallOptions().max_captures(64));
    if (!form.graph.empty()) {
      all.graph(form.graph);
    }
    if (!form.delay.empty()) {
      all.delay(form.delay);
    }
    return all;
  }
  /// Runs the steps of `program`, each with its order, and plainly. The report of each step.
  [[nodiscard]] std::vector<Report> train(const RankProgram& program, const Options& options) const {
    const auto layers = static_cast<std::int64_t>(program.place.parts * program.layers);
    CalledStack model(device_, {}, layers);
    CalledStack plain(device_, {}, layers);
    OffloadEngine engine(model, options);
    ChunksOfStep chunks(engine, program.layers);
    Rank mine(program.place, program.layers, device_, /*cut=*/false,
              [&](std::size_t layer, std::size_t microbatch, const at::Tensor& h) {
                chunks.before(layer, microbatch);
                const at::Tensor out = model.run_layer(layer, h);
                chunks.after(layer, microbatch);
                return out;
              });
    Rank other(
        program.place, program.layers, device_, /*cut=*/false,
        [&](std::size_t layer, std::size_t /*microbatch*/, const at::Tensor& h) { return plain.run_layer(layer, h); });
    std::vector<Report> reports;
    for (std::size_t step = 0; step < program.microbatches.size(); ++step) {
      const RankOrder order = program.order(step);
      const auto s = static_cast<std::int64_t>(step);
      StepTensors given;
      StepTensors expected;
      const StepTensors after = train_step(model, nullptr, [&] {
        Step in_step = engine.step(order_of_chunks(order, program.layers));
        given = mine.run(order, s);
        in_step.finish();
      });
      const StepTensors plainly = train_step(plain, nullptr, [&] { expected = other.run(order, s); });
      EXPECT_TRUE(same(given, expected)) << "step " << step;
      EXPECT_TRUE(same(after, plainly)) << "step " << step;
      reports.push_back(engine.report());
      EXPECT_EQ(reports.back().order_findings, std::vector<std::string>()) << "step " << step;
    }
    return reports;
  }

  c10::Device device_ = find_device("sim");
};

class OffloadConformanceForms : public OffloadConformance, public testing::WithParamInterface<Form> {};

TEST_P(OffloadConformanceForms, FractionsOfBytes) {
  std::vector<Report> last;
  for (const double fraction : {0.0, 0.5, 1.0}) {
    const testing::ScopedTrace at(__FILE__, __LINE__, "fraction " + std::to_string(fraction));
    last.push_back(train(interleaved(4), options(GetParam()).offload_fraction("**", fraction)).back());
    EXPECT_EQ(last.back().replays > 0, !GetParam().graph.empty());
  }
  EXPECT_EQ(last[0].offloaded_bytes, 0);
  EXPECT_GT(last[1].offloaded_bytes, 0);
  EXPECT_LE(last[1].offloaded_bytes, last[2].offloaded_bytes / 2);
  EXPECT_LT(last[2].step_peak_bytes, last[1].step_peak_bytes);
  EXPECT_LT(last[2].step_peak_bytes, last[0].step_peak_bytes);
  if (GetParam().name.rfind("mixed", 0) != 0) {  // there the peak is where half of the groups are on the device
    EXPECT_LT(last[1].step_peak_bytes, last[0].step_peak_bytes);
  }
}

// Upstream its manager finds a chunk finished if the chunk has nothing to offload.
TEST_F(OffloadConformance, ChunksThatOffloadNothing) {
  for (const RankPlace& place : {RankPlace{1, 0, 1}, RankPlace{2, 0, 1}, RankPlace{2, 1, 2}}) {
    for (const char* graph : {"", "layers.*"}) {
      for (const double fraction : {0.0, 1.0}) {
        const testing::ScopedTrace at(__FILE__, __LINE__, graph + std::to_string(fraction));
        const Report last =
            train({"one layer", place, 1, {2, 2, 4, 2}}, options({"", graph, ""}).offload_fraction("**", fraction))
                .back();
        EXPECT_EQ(last.chunks.size(), 2 * place.parts);
        EXPECT_TRUE(fraction > 0 || last.offloaded_bytes == 0);
      }
    }
  }
}

TEST_P(OffloadConformanceForms, ThePartOfTheFirstBackwardStaysWhole) {
  const Report last = train(interleaved(4), options(GetParam()).offload_at_most("layers.{4..7}.*", 0)).back();
  EXPECT_GT(last.offloaded_bytes, 0);
  for (const GroupReport& group : last.groups) {
    EXPECT_TRUE(group.name < "layers.4" || group.offloaded_bytes == 0) << group.name;
  }
}

TEST_P(OffloadConformanceForms, FewGroupsInFlight) {
  for (const std::int64_t groups : {0, 1, 2}) {
    const Report last = train(interleaved(4, {4, 4, 2, 4}), options(GetParam()).groups_in_flight(groups)).back();
    EXPECT_GT(last.offloaded_bytes, 0) << groups;
  }
}

TEST_P(OffloadConformanceForms, SlowCopiesInTheFirstStep) {
  const sim::OneThread one_thread;
  set_schedule(device_, Schedule::parse("d2h-late"));
  const std::vector<Report> reports = train(interleaved(4), options(GetParam()));
  set_schedule(device_, Schedule());
  EXPECT_GT(reports[0].inline_reloads, 0) << "without a plan a group is reloaded when backward needs it, or one ahead";
  EXPECT_EQ(reports[2].inline_reloads, 0);
}

INSTANTIATE_TEST_SUITE_P(Forms, OffloadConformanceForms,
                         testing::Values(Form{"eager", "", ""}, Form{"graphed", "layers.*", ""},
                                         Form{"mixed", "layers.{0,1,4,5}", ""},
                                         Form{"mixed_delayed", "layers.{0,1,4,5}", "layers.{2,3,6,7}.*"}),
                         [](const auto& info) { return info.param.name; });

TEST_F(OffloadConformance, EachSetOfNames) {
  const std::vector<std::vector<std::string>> sets = {
      {"norm"}, {"fc1"}, {"act"}, {"fc2"}, {"norm", "act"}, {"fc1", "fc2"}, {"norm", "fc1", "act", "fc2"}};
  std::vector<std::int64_t> bytes;
  for (const std::vector<std::string>& names : sets) {
    Options of_set = Options(device_).min_bytes(1024).lag(0).check_steps(8);
    for (const std::string& name : names) {
      of_set.offload("layers.*." + name);
    }
    bytes.push_back(train(interleaved(2), of_set)[0].offloaded_bytes);
    EXPECT_GT(bytes.back(), 0) << names[0];
  }
  EXPECT_EQ(bytes[4], bytes[0] + bytes[2]);
  EXPECT_EQ(bytes[5], bytes[1] + bytes[3]);
  EXPECT_EQ(bytes[6], bytes[4] + bytes[5]);
}

// `interleaved_pipeline_parallelism_no_param_grad_clone` upstream.
TEST_F(OffloadConformance, InterleavedWithoutClonesOfGradients) {
  for (const GradientPolicy policy : {GradientPolicy::owned, GradientPolicy::accumulated}) {
    Options without_clones = options({"", "layers.*", ""});
    without_clones.graph_options(GraphOptions().gradients("**", policy));
    EXPECT_GT(train(interleaved(4, {4, 4, 2, 4}), without_clones).back().replays, 0);
  }
}

}  // namespace
}  // namespace sidestream::testing_model
