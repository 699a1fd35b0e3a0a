#include "graphs/resources/call_context.h"

namespace sidestream {

EngineState* CallContext::active() noexcept { return ThreadStack<EngineState>::top(); }

}  // namespace sidestream
