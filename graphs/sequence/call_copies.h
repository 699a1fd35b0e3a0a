#pragma once
#include <cstddef>

#include "offload/captured_copies.h"
#include "runtime/handles.h"

namespace sidestream {

/// The copies of one call of a sequence, and the graphs that they lie between. A graph's place is its turn in the order of the
/// captures: in a sequence of n calls that of forward i is i, that of backward i is 2n - 1 - i.
struct CallCopies {
  CapturedCopies captured;
  std::size_t released_at = 0;  ///< place of the first graph that may use the sources' memory again
  std::size_t returns_at = 0;   ///< place of the backward graph from which on the targets' memory is nobody else's
  bool allocated = false;       ///< the targets, since that backward's capture
  Event left;                   ///< behind the latest copies to the host
  Event back;                   ///< behind the latest copies to the device
};

}  // namespace sidestream
