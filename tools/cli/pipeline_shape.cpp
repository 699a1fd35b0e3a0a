#include "tools/cli/pipeline_shape.h"

#include <fmt/format.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "sidestream/error.h"
#include "tools/cli/counted.h"

namespace sidestream::cli {

void declare_shape_options(CLI::App& command, PipelineShape& shape) {
  command.add_option("--pp", shape.ranks, "Ranks of the pipeline")->capture_default_str()->type_name("N");
  command.add_option("--vpp", shape.stages, "Virtual stages on each rank")->capture_default_str()->type_name("N");
  command.add_option("--microbatches", shape.microbatches, "Microbatches of a step")
      ->capture_default_str()
      ->type_name("N");
  command
      .add_option("--group", shape.group,
                  "Microbatches in a row through one virtual stage (default: the smallest number that is allowed)")
      ->type_name("N");
}

void require_group_fits(const PipelineShape& shape) {
  if (shape.group != 0 && shape.stages == 1) {
    throw UsageError(
        "--group is for several virtual stages on each rank, but --vpp is 1: leave out --group, or use --vpp 2");
  }
}

std::string title(const PipelineShape& shape) {
  const std::string base =
      shape.stages == 1 ? "1F1B" : fmt::format("Interleaved, {} virtual stages on each rank", shape.stages);
  return fmt::format("{}{}: {}, {}", base, shape.delay_weight_gradients ? ", zero-bubble" : "",
                     counted(shape.ranks, "rank"), counted(shape.microbatches, "microbatch"));
}

}  // namespace sidestream::cli
