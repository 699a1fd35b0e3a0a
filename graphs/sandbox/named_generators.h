#pragma once
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include "graphs/sequence/captured_call.h"
#include "sidestream/graph_options.h"

namespace sidestream {

/// Gives each call the generators that `options` name beside its own, each once, without the default one of `device`.
/// Throws: UsageError for a generator of another device.
void name_generators(std::vector<CallSpec>& specs, const GraphOptions& options, c10::Device device);

/// All that `specs` name, each once, behind the default generator of `device`.
[[nodiscard]] std::vector<at::Generator> generators_of(const std::vector<CallSpec>& specs, c10::Device device);

}  // namespace sidestream
