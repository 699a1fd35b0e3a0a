#pragma once
#include <cstdint>
#include <string_view>

#include "runtime/host_waits.h"

namespace sidestream {

/// The kind of a finding. Each has a name and a remedy.
enum class SyncKind : std::uint8_t {
  value,
  data_dependent,
  blocking_copy,
  pageable_copy,
  event,
  stream,
  device,
  allocation,
  pinning
};

/// The kind of a wait that `told` names, in the operator `innermost`, empty outside of all operators: a GPU tells what its driver is
/// asked for, which the operator explains.
[[nodiscard]] SyncKind sync_kind(HostWait told, std::string_view innermost);
/// "value read on the host". Lives as long as the process.
[[nodiscard]] const char* name_of(SyncKind kind);
/// What to use instead, in a sentence. Lives as long as the process.
[[nodiscard]] const char* remedy_for(SyncKind kind);

}  // namespace sidestream
