#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "sidestream/pipeline_order.h"

namespace sidestream::cli {

/// A rectangle in a row. Pixels count from the row's begin.
struct PictureBar {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::string style;
  double opacity = 1;
  std::string number;  ///< empty: none
};

struct PictureRow {
  std::string name;         ///< empty: none
  std::int64_t height = 0;  ///< pixels
  std::vector<PictureBar> bars;
  std::vector<std::pair<std::int64_t, double>> line;  ///< pixel, and height as a part of the row's
};

/// A class of the style sheet and what it means.
struct PictureKey {
  std::string style;
  std::string name;
  std::int64_t width = 0;  ///< pixels
};

/// Work of a pipeline over time, as rows.
struct PipelinePicture {
  std::string title;
  std::string words;        ///< the line below
  std::string more_styles;  ///< of a style sheet, beside forward, backward and weights
  std::int64_t length = 0;  ///< of each row, in pixels
  std::int64_t stages = 1;  ///< virtual stages
  std::vector<PictureKey> keys;
  std::vector<PictureRow> rows;
};

/// Height of a row with numbers, in pixels.
inline constexpr std::int64_t kPictureRow = 22;

/// Pixels for the shortest work of `shape`, so that its number has room.
[[nodiscard]] std::int64_t pixels_of_unit(const PipelineShape& shape);
/// The work of a chunk; later virtual stages are paler.
[[nodiscard]] PictureBar bar_of(const PipelineStep& step, const PipelineShape& shape, std::int64_t begin,
                                std::int64_t end);
/// The kinds of work that `shape` has.
[[nodiscard]] std::vector<PictureKey> keys_of(const PipelineShape& shape);
/// The picture as SVG.
[[nodiscard]] std::string svg_of(const PipelinePicture& picture);

}  // namespace sidestream::cli
