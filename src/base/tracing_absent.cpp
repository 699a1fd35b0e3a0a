#include "base/tracing.h"

// Built where no NVTX headers are: ranges are no-ops.

namespace sidestream::tracing {

Name::Name(const char* /*label*/) {}

Scope::Scope(Range /*kind*/, const Name& /*name*/) noexcept {}

Scope::~Scope() = default;

}  // namespace sidestream::tracing
