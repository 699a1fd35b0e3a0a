#include "observe/sync_kinds.h"

#include <algorithm>
#include <iterator>

namespace sidestream {
namespace {

/// `operator_name` may have an overload behind a dot.
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
             "when the step "
             "has ended: a loss is as well read a step later";
    case SyncKind::data_dependent:
      return "the host must know the shape before it goes on. Use a form of fixed shape (where(), masks, top-k, a "
             "fixed capacity, one "
             "grouped product over all experts). Experts that are chosen by data and run one by one synchronise by "
             "nature: read "
             "their counts once a layer, in eager code between graphed calls";
    case SyncKind::blocking_copy:
      return "pass non_blocking, with host memory that is pinned, and wait for an event where the bytes are needed; "
             "from the device, "
             "read them when the step has ended";
    case SyncKind::pageable_copy:
      return "pin the host memory (pin_memory()) and pass non_blocking; make constants on the device once, before the "
             "steps, and "
             "batches of data before the step begins";
    case SyncKind::event:
      return "let a stream wait for the event instead of the host (c10::Event::block), or query it later";
    case SyncKind::stream:
      return "let the other stream wait for an event that is recorded on this one, not the host";
    case SyncKind::device:
      return "leave it out, or do it between steps; events order streams without the host, and memory that is given "
             "back to the "
             "driver waits for the device";
    case SyncKind::allocation:
      return "sizes that change from step to step, or memory given back to the driver in between, make the caching "
             "allocator ask the "
             "driver: keep sizes the same (pad, fixed capacity), do not release cached memory in steps, and keep on "
             "the device what is "
             "made anew in each step";
    case SyncKind::pinning:
      return "memory is pinned, and unpinned, behind all work of the device, and slowly: pin buffers once, before the "
             "steps, and use them again (pin_memory() keeps freed ones of the same size)";
  }
  return "";
}

}  // namespace sidestream
