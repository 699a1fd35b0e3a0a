#pragma once
#include <string_view>

#include "runtime/host_waits.h"

namespace sidestream {

/// The kind of a finding: of a wait that `told` names, in the operator `innermost`, empty outside of all operators. A GPU tells what its
/// driver is asked for, which the operator explains.
[[nodiscard]] HostWait sync_kind(HostWait told, std::string_view innermost);
/// "value read on the host". Lives as long as the process.
[[nodiscard]] const char* name_of(HostWait kind);
/// What to use instead, in a sentence. Lives as long as the process.
[[nodiscard]] const char* remedy_for(HostWait kind);

}  // namespace sidestream
