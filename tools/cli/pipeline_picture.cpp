#include "tools/cli/pipeline_picture.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>

namespace sidestream::cli {
namespace {

using Kind = PipelineStep::Kind;

constexpr int kUnit = 18;  // pixels of one unit of time
constexpr int kDigit = 7;  // of one digit of a number
constexpr int kGap = 4;
constexpr int kLeft = 64;
constexpr int kTop = 84;
constexpr int kLegend = 58;
constexpr int kMargin = 14;
constexpr int kNarrowest = 640;  // room for the words above
constexpr int kNote = 330;       // and for those after the keys

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
)";

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

std::string legend(const PipelinePicture& picture) {
  std::string svg;
  std::int64_t x = kLeft;
  for (const PictureKey& key : picture.keys) {
    svg += fmt::format(
        "<rect class=\"{}\" x=\"{}\" y=\"{}\" width=\"12\" height=\"12\"/><text class=\"quiet\" x=\"{}\" "
        "y=\"{}\">{}</text>\n",
        key.style, x, kLegend, x + 17, kLegend + 10, key.name);
    x += key.width;
  }
  return svg + fmt::format("<text class=\"quiet\" x=\"{}\" y=\"{}\">numbers are microbatches{}</text>\n", x,
                           kLegend + 10, picture.stages == 1 ? "" : "; later virtual stages are paler");
}

std::string svg_of(const PictureRow& row, std::int64_t y, std::int64_t length) {
  std::string svg;
  const auto out = std::back_inserter(svg);
  if (!row.name.empty()) {
    fmt::format_to(out, "<text class=\"ink\" x=\"{}\" y=\"{}\">{}</text>\n", kMargin, y + 15, row.name);
  }
  fmt::format_to(out, "<rect class=\"lane\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>\n", kLeft, y, length,
                 row.height);
  for (const PictureBar& bar : row.bars) {
    const std::int64_t x = kLeft + bar.begin;
    const std::int64_t wide = bar.end - bar.begin;
    fmt::format_to(out, "<rect class=\"{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill-opacity=\"{:.2f}\"/>",
                   bar.style, x, y, std::max<std::int64_t>(wide - 1, 1), row.height, bar.opacity);
    if (!bar.number.empty()) {
      fmt::format_to(out, "<text class=\"number\" x=\"{}\" y=\"{}\">{}</text>", x + wide / 2, y + 15, bar.number);
    }
    svg += '\n';
  }
  if (!row.line.empty()) {
    svg += "<polyline class=\"line\" points=\"";
    for (const auto& [x, part] : row.line) {
      fmt::format_to(out, "{},{:.1f} ", kLeft + x,
                     static_cast<double>(y) + static_cast<double>(row.height) * (1 - part));
    }
    svg += "\"/>\n";
  }
  return svg;
}

}  // namespace

std::int64_t pixels_of_unit(const PipelineShape& shape) {
  const auto digits = static_cast<std::int64_t>(std::to_string(shape.microbatches - 1).size());
  return std::max<std::int64_t>(kUnit, kDigit * digits + 4);
}

PictureBar bar_of(const PipelineStep& step, const PipelineShape& shape, std::int64_t begin, std::int64_t end) {
  const double paler =
      static_cast<double>(step.stage) / static_cast<double>(std::max<std::int64_t>(shape.stages - 1, 1));
  return {begin, end, style_of(step.kind), 1 - 0.6 * paler, std::to_string(step.microbatch)};
}

std::vector<PictureKey> keys_of(const PipelineShape& shape) {
  std::vector<PictureKey> keys{{"forward", "forward", 90}, {"backward", "backward", 90}};
  if (shape.delay_weight_gradients) {
    keys.push_back({"weights", "weight gradients", 130});
  }
  return keys;
}

std::string svg_of(const PipelinePicture& picture) {
  std::int64_t legend_width = kNote;
  for (const PictureKey& key : picture.keys) {
    legend_width += key.width;
  }
  const std::int64_t width = kLeft + std::max<std::int64_t>({picture.length, kNarrowest, legend_width}) + kMargin;
  std::int64_t height = kTop + kMargin;
  std::string rows;
  for (const PictureRow& row : picture.rows) {
    rows += svg_of(row, height - kMargin, picture.length);
    height += row.height + kGap;
  }
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\">\n{2}{8}"
             "</style>\n"
             "<rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{3}\" height=\"{4}\" rx=\"6\"/>\n"
             "<text class=\"ink\" x=\"{5}\" y=\"24\" style=\"font-size: 14px; font-weight: 600\">{6}</text>\n"
             "<text class=\"quiet\" x=\"{5}\" y=\"44\">{7}</text>\n",
             width, height, kStyle, width - 1, height - 1, kMargin, picture.title, picture.words, picture.more_styles) +
         legend(picture) + rows + "</svg>\n";
}

}  // namespace sidestream::cli
