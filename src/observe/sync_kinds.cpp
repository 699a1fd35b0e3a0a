#include "observe/sync_kinds.h"

#include <algorithm>
#include <iterator>

namespace sidestream {
namespace {

/// `operator_name` may have an overload after a dot.
template <class Names>
bool is_among(std::string_view operator_name, const Names& names) {
  operator_name = operator_name.substr(0, operator_name.find('.'));
  return std::find(std::begin(names), std::end(names), operator_name) != std::end(names);
}

constexpr std::string_view kValues[] = {
    "aten::item",     "aten::_local_scalar_dense",  "aten::is_nonzero",   "aten::equal",
    "aten::allclose", "aten::_linalg_check_errors", "aten::_is_all_true", "aten::_is_any_true"};
constexpr std::string_view kCopies[] = {"aten::copy_",   "aten::_copy_from", "aten::_to_copy",
                                        "aten::to",      "aten::cpu",        "aten::_copy_from_and_resize",
                                        "aten::set_data"};

}  // namespace

SyncKind sync_kind(HostWait told, std::string_view innermost) {
  switch (told) {
    case HostWait::allocation:
      return SyncKind::allocation;
    case HostWait::pinning:
      return SyncKind::pinning;
    case HostWait::event:
      return SyncKind::event;
    case HostWait::device:
      return SyncKind::device;
    case HostWait::result:
      return is_among(innermost, kValues) ? SyncKind::value : SyncKind::data_dependent;
    case HostWait::blocking_copy:
    case HostWait::pageable_copy:
      if (is_among(innermost, kValues)) {
        return SyncKind::value;
      }
      return told == HostWait::pageable_copy ? SyncKind::pageable_copy : SyncKind::blocking_copy;
    case HostWait::stream:
      if (innermost.empty()) {
        return SyncKind::stream;
      }
      if (is_among(innermost, kValues)) {
        return SyncKind::value;
      }
      return is_among(innermost, kCopies) ? SyncKind::blocking_copy : SyncKind::data_dependent;
  }
  return SyncKind::stream;
}

const char* name_of(SyncKind kind) {
  switch (kind) {
    case SyncKind::value:
      return "value read on the host";
    case SyncKind::data_dependent:
      return "result whose shape depends on data";
    case SyncKind::blocking_copy:
      return "blocking copy";
    case SyncKind::pageable_copy:
      return "copy of pageable host memory";
    case SyncKind::event:
      return "event synchronisation";
    case SyncKind::stream:
      return "stream synchronisation";
    case SyncKind::device:
      return "device synchronisation";
    case SyncKind::allocation:
      return "device allocation";
    case SyncKind::pinning:
      return "pinning of host memory";
  }
  return "";
}

const char* remedy_for(SyncKind kind) {
  switch (kind) {
    case SyncKind::value:
      return "keep the value on the device (where(), clamp(), a tensor for a learning rate or a scale), or read it "
             "after the step has ended. A loss can also be read one step later";
    case SyncKind::data_dependent:
      return "the host must know the shape before it continues. Use an operation with a fixed shape (where(), masks, "
             "top-k, a fixed capacity, one grouped product over all experts). Experts that are chosen by data and run "
             "one by one cannot avoid this: read their counts once per layer, in eager code between graphed calls";
    case SyncKind::blocking_copy:
      return "pass non_blocking and use pinned host memory; wait for an event before the bytes are needed. If the copy "
             "goes to the host, read the bytes after the step has ended";
    case SyncKind::pageable_copy:
      return "pin the host memory (pin_memory()) and pass non_blocking. Create constants on the device once, before "
             "the steps, and copy batches of data before the step begins";
    case SyncKind::event:
      return "let a stream wait for the event instead of the host (c10::Event::block), or query it later";
    case SyncKind::stream:
      return "let the other stream wait for an event that is recorded on this one, not the host";
    case SyncKind::device:
      return "remove it, or do it between steps. Events order streams without the host; returning memory to the driver "
             "waits for the device";
    case SyncKind::allocation:
      return "the caching allocator requests memory from the driver if sizes change from step to step, or if memory "
             "was returned to the driver. Keep sizes the same (pad, fixed capacity), do not release cached memory in "
             "steps, and reuse tensors that each step creates again";
    case SyncKind::pinning:
      return "pinning and unpinning are slow, and wait for all work of the device: pin buffers once, before the steps, "
             "and reuse them (pin_memory() keeps freed buffers of the same size)";
  }
  return "";
}

}  // namespace sidestream
