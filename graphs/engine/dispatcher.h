#pragma once
#include <cstddef>

#include "graphs/engine/call_table.h"
#include "sidestream/call.h"

namespace sidestream {

class CallContext;
class EagerPlan;
struct EngineResources;
class RecordedCalls;
class ReportBuilder;

/// Decides what becomes of one call in a step: a scope, a replay, or a run that is recorded so that a capture may follow.
/// Threads: the step's.
class Dispatcher {
 public:
  /// All must outlive this object.
  Dispatcher(EngineResources& resources, CallContext& context, const EagerPlan& plan, RecordedCalls& recorded,
             ReportBuilder& report)
      : resources_(resources), context_(context), plan_(plan), recorded_(recorded), report_(report) {}
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;
  ~Dispatcher() = default;

  /// Throws: as ss::call.
  void dispatch(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs);

 private:
  void run_eagerly(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs);
  void record_and_run(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs, std::size_t busy);
  void replay_or_record(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs);

  EngineResources& resources_;
  CallContext& context_;
  const EagerPlan& plan_;
  RecordedCalls& recorded_;
  ReportBuilder& report_;
};

}  // namespace sidestream
