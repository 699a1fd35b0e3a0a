#include "sidestream/detail/call_request.h"

#include "graphs/engine/engine_state.h"
#include "sidestream/error.h"

namespace sidestream::detail {

bool step_active() noexcept { return CallContext::active() != nullptr; }

void dispatch(CallRequest& request, TensorBuffer& outputs) { CallContext::active()->dispatch(request, outputs); }

void refuse_null_module() {
  throw UsageError("ss::call was given no module (a null pointer, or a holder that is empty); make the module first");
}

void refuse_null_name() { throw UsageError("ss::call was given an empty name; pass a name for the function"); }

}  // namespace sidestream::detail
