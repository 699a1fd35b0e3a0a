#pragma once
#include <string>

#include "graphs/calls/call_site.h"
#include "sidestream/detail/call_request.h"

namespace sidestream {

/// "graphed call "name"", for the errors and warnings here.
[[nodiscard]] std::string describe(const CallSite& site);

/// No capture of `site` fits `request`; `other`: one of them, or null. Throws: UsageError that says what differs.
[[noreturn]] void refuse_new_arguments(const CallSite& site, const detail::CallRequest& request,
                                       const CallVariant* other);
/// The call runs eagerly because no capture fits. Warns once, if the rules of `site` say so.
void warn_of_new_arguments(CallSite& site);
/// The backward of an earlier call of `site` is pending. Throws: UsageError.
[[noreturn]] void refuse_own_pending(const CallSite& site);
/// The call needs more captures than there may be, and runs eagerly. Warns once. `in_flight`: because microbatches are in flight.
/// Throws: UsageError, if the rules of `site` refuse such calls.
void over_bound(CallSite& site, bool in_flight);
/// An argument is not equal to its own copy, so no capture can match it. Warns once.
void warn_of_equality(CallSite& site);

}  // namespace sidestream
