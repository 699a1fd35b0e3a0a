#include <memory>
#include <vector>

#include "graphs/engine/engine_state.h"
#include "sidestream/detail/call_buffers.h"
#include "sidestream/detail/call_request.h"
#include "sidestream/error.h"

namespace sidestream::detail {
namespace {

/// A thread's own, by how deep its calls are inside of each other.
struct BuffersOfThread {
  std::vector<std::unique_ptr<CallBuffers>> all;
  std::size_t lent = 0;
};

BuffersOfThread& buffers_of_thread() {
  static thread_local BuffersOfThread buffers;
  return buffers;
}

}  // namespace

LentBuffers::LentBuffers() : buffers_(nullptr) {
  BuffersOfThread& thread = buffers_of_thread();
  if (thread.lent == thread.all.size()) {
    thread.all.push_back(std::make_unique<CallBuffers>());
  }
  buffers_ = thread.all[thread.lent++].get();
}

LentBuffers::~LentBuffers() {
  buffers_->inputs.clear();  // while they are lent: what dies here may call
  buffers_->guards.clear();
  buffers_->shape.clear();
  buffers_->outputs.clear();
  --buffers_of_thread().lent;
}

bool step_active() noexcept { return CallContext::active() != nullptr; }

void dispatch(CallRequest& request, TensorBuffer& outputs) { CallContext::active()->dispatch(request, outputs); }

void refuse_null_module() {
  throw UsageError("ss::call was given no module (a null pointer, or a holder that is empty); make the module first");
}

void refuse_null_name() { throw UsageError("ss::call was given an empty name; pass a name for the function"); }

}  // namespace sidestream::detail
