#include "sidestream/version.h"

namespace sidestream {

const char* version() noexcept { return SIDESTREAM_VERSION; }

}  // namespace sidestream
