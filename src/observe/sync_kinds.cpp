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

HostWait sync_kind(HostWait told, std::string_view innermost) {
  switch (told) {
    case HostWait::value:
    case HostWait::event:
    case HostWait::device:
    case HostWait::allocation:
    case HostWait::pinning:
      return told;
    case HostWait::data_dependent:
    case HostWait::blocking_copy:
    case HostWait::pageable_copy:
      return is_among(innermost, kValues) ? HostWait::value : told;
    case HostWait::stream:
      if (innermost.empty()) {
        return told;
      }
      if (is_among(innermost, kValues)) {
        return HostWait::value;
      }
      return is_among(innermost, kCopies) ? HostWait::blocking_copy : HostWait::data_dependent;
  }
  return told;
}

const char* name_of(HostWait kind) {
  switch (kind) {
    case HostWait::value:
      return "value read on the host";
    case HostWait::data_dependent:
      return "result whose shape depends on data";
    case HostWait::blocking_copy:
      return "blocking copy";
    case HostWait::pageable_copy:
      return "copy of pageable host memory";
    case HostWait::event:
      return "event synchronisation";
    case HostWait::stream:
      return "stream synchronisation";
    case HostWait::device:
      return "device synchronisation";
    case HostWait::allocation:
      return "device allocation";
    case HostWait::pinning:
      return "pinning of host memory";
  }
  return "";
}

const char* remedy_for(HostWait kind) {
  switch (kind) {
    case HostWait::value:
      return "keep the value on the device (where(), clamp(), a tensor for a learning rate or a scale), or read it "
             "after the step has ended. A loss can also be read one step later";
    case HostWait::data_dependent:
      return "the host must know the shape before it continues. Use an operation with a fixed shape (where(), masks, "
             "top-k, a fixed capacity, one grouped product over all experts). Experts that are chosen by data and run "
             "one by one cannot avoid this: read their counts once per layer, in eager code between graphed calls";
    case HostWait::blocking_copy:
      return "pass non_blocking and use pinned host memory; wait for an event before the bytes are needed. If the copy "
             "goes to the host, read the bytes after the step has ended";
    case HostWait::pageable_copy:
      return "pin the host memory (pin_memory()) and pass non_blocking. Create constants on the device once, before "
             "the steps, and copy batches of data before the step begins";
    case HostWait::event:
      return "let a stream wait for the event instead of the host (c10::Event::block), or query it later";
    case HostWait::stream:
      return "let the other stream wait for an event that is recorded on this one, not the host";
    case HostWait::device:
      return "remove it, or do it between steps. Events order streams without the host; returning memory to the driver "
             "waits for the device";
    case HostWait::allocation:
      return "the caching allocator requests memory from the driver if sizes change from step to step, or if memory "
             "was returned to the driver. Keep sizes the same (pad, fixed capacity), do not release cached memory in "
             "steps, and reuse tensors that each step creates again";
    case HostWait::pinning:
      return "pinning and unpinning are slow, and wait for all work of the device: pin buffers once, before the steps, "
             "and reuse them (pin_memory() keeps freed buffers of the same size)";
  }
  return "";
}

}  // namespace sidestream
