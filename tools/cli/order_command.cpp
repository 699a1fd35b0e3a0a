#include "tools/cli/order_command.h"

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <CLI/Validators.hpp>

#include "sidestream/error.h"
#include "tools/cli/pipeline_picture.h"
#include "tools/cli/pipeline_shape.h"
#include "tools/cli/report_file.h"
#include "tools/cli/standard_output.h"

namespace sidestream::cli {
namespace {

using Kind = PipelineStep::Kind;

/// The orders of all ranks, timed.
struct Orders {
  PipelineShape shape;
  std::vector<std::vector<TimedStep>> ranks;
  std::int64_t length = 0;  ///< when the last step ends
};

/// `kind` as a choice between the fields of a shape.
void apply_kind(OrderOptions& options) {
  PipelineShape& shape = options.shape;
  require_group_fits(shape);
  shape.delay_weight_gradients = options.kind == "zero-bubble";
  if (options.kind == "1f1b" && shape.stages != 1) {
    throw UsageError(fmt::format(
        "--kind 1f1b has one virtual stage on each rank, but --vpp is {}: use --kind interleaved", shape.stages));
  }
  if (options.kind == "interleaved" && shape.stages == 1) {
    throw UsageError(
        "--kind interleaved needs several virtual stages on each rank, but --vpp is 1: use --kind 1f1b, or --vpp 2");
  }
}

Orders orders_of(const PipelineShape& shape) {
  std::vector<std::vector<PipelineStep>> orders;
  do {  // a shape without ranks is refused here
    orders.push_back(pipeline_order(shape, static_cast<std::int64_t>(orders.size())));
  } while (static_cast<std::int64_t>(orders.size()) < shape.ranks);
  Orders result{shape, pipeline_times(orders)};
  for (const std::vector<TimedStep>& rank : result.ranks) {
    result.length = std::max(result.length, rank.back().end);
  }
  return result;
}

std::string length_words(const Orders& orders) {
  return fmt::format("{} units of time, of which each rank works {}. A forward takes 1, a backward {}", orders.length,
                     3 * orders.shape.stages * orders.shape.microbatches,
                     orders.shape.delay_weight_gradients ? "1, weight gradients 1" : "2");
}

/// The most chunks whose saved tensors a rank keeps at once.
std::int64_t most_in_flight(const std::vector<TimedStep>& rank, Kind last) {
  std::int64_t now = 0;
  std::int64_t most = 0;
  for (const TimedStep& timed : rank) {
    now += timed.step.kind == Kind::forward ? 1 : timed.step.kind == last ? -1 : 0;
    most = std::max(most, now);
  }
  return most;
}

/// "F3", or "F1.3" with several virtual stages.
std::string words_of(const PipelineStep& step, const PipelineShape& shape) {
  const char work = "FBW"[static_cast<int>(step.kind)];
  return shape.stages == 1 ? fmt::format("{}{}", work, step.microbatch)
                           : fmt::format("{}{}.{}", work, step.stage, step.microbatch);
}

std::string table(const Orders& orders, std::int64_t first, std::int64_t last) {
  const PipelineShape& shape = orders.shape;
  std::string text = title(shape) + "\n\nrank  in flight  order\n";
  for (std::int64_t rank = first; rank < last; ++rank) {
    const std::vector<TimedStep>& steps = orders.ranks[rank];
    text += fmt::format("{:4}  {:9} ", rank,
                        most_in_flight(steps, shape.delay_weight_gradients ? Kind::weight_gradients : Kind::backward));
    for (const TimedStep& timed : steps) {
      text += " " + words_of(timed.step, shape);
    }
    text += "\n";
  }
  text += fmt::format("\n{}.\n", length_words(orders));
  const std::int64_t microbatch = std::min<std::int64_t>(shape.microbatches - 1, 3);
  const std::string chunk = fmt::format("{}{}", shape.stages == 1 ? "" : "1.", microbatch);
  text += fmt::format("F{0} is the forward of microbatch {1}{2}, B{0} its backward{3}.\n", chunk, microbatch,
                      shape.stages == 1 ? "" : " in virtual stage 1",
                      shape.delay_weight_gradients ? fmt::format(", W{} its weight gradients", chunk) : "");
  text += "In flight: the most chunks whose saved tensors a rank keeps at once.\n";
  return text;
}

/// A row for each rank, a column for each unit of time.
std::string picture(const Orders& orders, std::int64_t first, std::int64_t last) {
  const std::int64_t unit = pixels_of_unit(orders.shape);
  PipelinePicture picture{title(orders.shape), length_words(orders),  {}, orders.length * unit,
                          orders.shape.stages, keys_of(orders.shape), {}};
  for (std::int64_t rank = first; rank < last; ++rank) {
    PictureRow& row = picture.rows.emplace_back(PictureRow{fmt::format("rank {}", rank), kPictureRow, {}, {}});
    for (const TimedStep& timed : orders.ranks[rank]) {
      row.bars.push_back(bar_of(timed.step, orders.shape, timed.begin * unit, timed.end * unit));
    }
  }
  return svg_of(picture);
}

}  // namespace

void declare_order_options(CLI::App& command, OrderOptions& options) {
  declare_shape_options(command, options.shape);
  command
      .add_option("--kind", options.kind,
                  "1f1b, interleaved or zero-bubble (default: 1f1b; interleaved with several virtual stages)")
      ->check(CLI::IsMember({"1f1b", "interleaved", "zero-bubble"}))
      ->type_name("NAME");
  command.add_option("--rank", options.rank, "Show this rank only")->type_name("R");
  command.add_option("--svg", options.svg, "Draw the orders into this file")->type_name("FILE");
}

int order(OrderOptions options) {
  apply_kind(options);
  const Orders orders = orders_of(options.shape);
  if (options.rank) {
    (void)pipeline_order(options.shape, *options.rank);  // refuses a rank that does not exist
  }
  const std::int64_t first = options.rank.value_or(0);
  const std::int64_t last = options.rank ? first + 1 : options.shape.ranks;
  if (!options.svg.empty()) {
    ReportFile(options.svg, "--svg").commit(picture(orders, first, last));
  }
  print(table(orders, first, last));
  return 0;
}

}  // namespace sidestream::cli
