#include <utility>

#include "base/site.h"

// Built where no NVTX headers are: ranges are no-ops.

namespace sidestream {

thread_local constinit const Site* Site::innermost_ = nullptr;

SiteName::SiteName(std::string text) : text_(std::move(text)) {}

NvtxRange::NvtxRange(Activity /*activity*/, const SiteName& /*name*/) noexcept {}

NvtxRange::~NvtxRange() = default;

}  // namespace sidestream
