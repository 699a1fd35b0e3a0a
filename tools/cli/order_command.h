#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "sidestream/pipeline_order.h"

namespace CLI {
class App;
}

namespace sidestream::cli {

/// What `sidestream order` was asked for.
struct OrderOptions {
  PipelineShape shape{4, 1, 8};
  std::string kind;  ///< "1f1b", "interleaved" or "zero-bubble"; empty: one of the first two, by `shape`
  std::optional<std::int64_t> rank;  ///< the only one to show
  std::filesystem::path svg;         ///< where to draw; empty: nowhere
};

/// Declares the options of `sidestream order` on `command`; parsing fills `options`, which must outlive it.
void declare_order_options(CLI::App& command, OrderOptions& options);

/// `sidestream order`: the orders of a pipeline's ranks on stdout, and as a picture. Returns the exit code.
/// Throws: UsageError for an order that is not defined, and for a file that cannot be written.
[[nodiscard]] int order(OrderOptions options);

}  // namespace sidestream::cli
