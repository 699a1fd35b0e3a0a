#pragma once
#include <memory>

#include "runtime/runtime.h"
#include "sidestream/graph_event.h"

namespace sidestream {

struct GraphEvent::State {
  std::shared_ptr<Runtime> runtime;
  ExternalEvent event;
};

}  // namespace sidestream
