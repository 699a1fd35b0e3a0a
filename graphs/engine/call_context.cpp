#include "graphs/engine/call_context.h"

#include <utility>

namespace sidestream {
namespace {

thread_local EngineState* t_active = nullptr;

}  // namespace

EngineState* CallContext::active() noexcept { return t_active; }

CallContext::OnThread::OnThread(const CallContext& context) noexcept
    : before_(std::exchange(t_active, &context.engine_)) {}

CallContext::OnThread::~OnThread() { t_active = before_; }

}  // namespace sidestream
