#include "tools/cli/order_command.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <CLI/Validators.hpp>

#include "sidestream/error.h"
#include "tools/cli/report_file.h"
#include "tools/cli/standard_output.h"

namespace sidestream::cli {
namespace {

using Kind = PipelineStep::Kind;

constexpr int kUnit = 18;  // pixels of one unit of time
constexpr int kDigit = 7;  // of one digit of a number
constexpr int kRow = 26;
constexpr int kBar = 22;
constexpr int kLeft = 64;
constexpr int kTop = 84;
constexpr int kLegend = 58;
constexpr int kMargin = 14;
constexpr int kNarrowest = 640;  // room for the words above

constexpr const char* kStyle = R"(<style>
  .card { fill: #ffffff; stroke: #d0d7de; }
  .ink { fill: #1f2328; }
  .quiet { fill: #59636e; }
  .lane { fill: #f6f8fa; }
  .forward { fill: #54aeff; }
  .backward { fill: #c297ff; }
  .weights { fill: #4ac26b; }
  .number { fill: #1f2328; font-size: 10px; text-anchor: middle; }
  text { font-family: 'DejaVu Sans', Helvetica, Arial, sans-serif; font-size: 11px; }
</style>
)";

/// The orders of all ranks, timed.
struct Orders {
  PipelineShape shape;
  std::vector<std::vector<TimedStep>> ranks;
  std::int64_t length = 0;  ///< when the last step ends
};

/// `kind` as a choice between the fields of a shape.
void apply_kind(OrderOptions& options) {
  PipelineShape& shape = options.shape;
  if (shape.group != 0 && shape.stages == 1) {
    throw UsageError(
        "--group is for several virtual stages on each rank, but --vpp is 1: leave out --group, or use --vpp 2");
  }
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

std::string title(const PipelineShape& shape) {
  const std::string base =
      shape.stages == 1 ? "1F1B" : fmt::format("Interleaved, {} virtual stages on each rank", shape.stages);
  return fmt::format("{}{}: {} ranks, {} microbatches", base, shape.delay_weight_gradients ? ", zero-bubble" : "",
                     shape.ranks, shape.microbatches);
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

const char* style_of(Kind kind) {
  switch (kind) {
    case Kind::forward:
      return "forward";
    case Kind::backward:
      return "backward";
    case Kind::weight_gradients:
      return "weights";
  }
  return "";
}

/// The colours of the steps that `shape` has, with their names.
std::string legend(const PipelineShape& shape) {
  std::string svg;
  std::int64_t x = kLeft;
  for (const Kind kind : {Kind::forward, Kind::backward, Kind::weight_gradients}) {
    if (kind != Kind::weight_gradients || shape.delay_weight_gradients) {
      const char* name = kind == Kind::weight_gradients ? "weight gradients" : style_of(kind);
      svg += fmt::format(
          "<rect class=\"{}\" x=\"{}\" y=\"{}\" width=\"12\" height=\"12\"/><text class=\"quiet\" x=\"{}\" "
          "y=\"{}\">{}</text>\n",
          style_of(kind), x, kLegend, x + 17, kLegend + 10, name);
      x += kind == Kind::weight_gradients ? 130 : 90;
    }
  }
  return svg + fmt::format("<text class=\"quiet\" x=\"{}\" y=\"{}\">numbers are microbatches{}</text>\n", x,
                           kLegend + 10, shape.stages == 1 ? "" : "; later virtual stages are paler");
}

/// A row for each rank, a column for each unit of time. Later virtual stages are paler.
std::string picture(const Orders& orders, std::int64_t first, std::int64_t last) {
  const PipelineShape& shape = orders.shape;
  const std::int64_t digits = static_cast<std::int64_t>(std::to_string(shape.microbatches - 1).size());
  const std::int64_t unit = std::max<std::int64_t>(kUnit, kDigit * digits + 4);
  const std::int64_t width = kLeft + std::max<std::int64_t>(orders.length * unit, kNarrowest) + kMargin;
  const std::int64_t height = kTop + (last - first) * kRow + kMargin;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\">\n{2}"
      "<rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{3}\" height=\"{4}\" rx=\"6\"/>\n"
      "<text class=\"ink\" x=\"{5}\" y=\"24\" style=\"font-size: 14px; font-weight: 600\">{6}</text>\n"
      "<text class=\"quiet\" x=\"{5}\" y=\"44\">{7}</text>\n",
      width, height, kStyle, width - 1, height - 1, kMargin, title(shape), length_words(orders));
  svg += legend(shape);
  const auto out = std::back_inserter(svg);
  for (std::int64_t rank = first; rank < last; ++rank) {
    const std::int64_t y = kTop + (rank - first) * kRow;
    fmt::format_to(out, "<text class=\"ink\" x=\"{}\" y=\"{}\">rank {}</text>\n", kMargin, y + 15, rank);
    fmt::format_to(out, "<rect class=\"lane\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>\n", kLeft, y,
                   orders.length * unit, kBar);
    for (const TimedStep& timed : orders.ranks[rank]) {
      const std::int64_t x = kLeft + timed.begin * unit;
      const std::int64_t wide = (timed.end - timed.begin) * unit;
      fmt::format_to(out, "<rect class=\"{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill-opacity=\"{:.2f}\"/>",
                     style_of(timed.step.kind), x, y, wide - 1, kBar,
                     1 - 0.6 * static_cast<double>(timed.step.stage) /
                             static_cast<double>(std::max<std::int64_t>(shape.stages - 1, 1)));
      fmt::format_to(out, "<text class=\"number\" x=\"{}\" y=\"{}\">{}</text>\n", x + wide / 2, y + 15,
                     timed.step.microbatch);
    }
  }
  return svg + "</svg>\n";
}

}  // namespace

void declare_order_options(CLI::App& command, OrderOptions& options) {
  command.add_option("--pp", options.shape.ranks, "Ranks of the pipeline")->capture_default_str()->type_name("N");
  command.add_option("--vpp", options.shape.stages, "Virtual stages on each rank")
      ->capture_default_str()
      ->type_name("N");
  command.add_option("--microbatches", options.shape.microbatches, "Microbatches of a step")
      ->capture_default_str()
      ->type_name("N");
  command
      .add_option("--kind", options.kind,
                  "1f1b, interleaved or zero-bubble (default: 1f1b; interleaved with several virtual stages)")
      ->check(CLI::IsMember({"1f1b", "interleaved", "zero-bubble"}))
      ->type_name("NAME");
  command
      .add_option("--group", options.shape.group,
                  "Microbatches in a row through one virtual stage (default: the smallest number that is allowed)")
      ->type_name("N");
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
