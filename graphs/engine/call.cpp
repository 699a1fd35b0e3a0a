#include "sidestream/call.h"

#include "graphs/engine/engine_state.h"

namespace sidestream::detail {

bool step_active() noexcept { return CallContext::active() != nullptr; }

void dispatch(CallRequest& request, TensorBuffer& outputs) { CallContext::active()->dispatch(request, outputs); }

}  // namespace sidestream::detail
