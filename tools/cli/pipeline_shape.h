#pragma once
#include <string>

#include "sidestream/pipeline_order.h"

namespace CLI {
class App;
}

namespace sidestream::cli {

/// Declares --pp, --vpp, --microbatches and --group on `command`; parsing fills `shape`, which must outlive it.
void declare_shape_options(CLI::App& command, PipelineShape& shape);

/// Throws: UsageError if --group was given for one virtual stage.
void require_group_fits(const PipelineShape& shape);

/// "Interleaved, 2 virtual stages on each rank: 4 ranks, 8 microbatches".
[[nodiscard]] std::string title(const PipelineShape& shape);

}  // namespace sidestream::cli
