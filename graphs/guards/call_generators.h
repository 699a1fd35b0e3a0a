#pragma once
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include "graphs/guards/call_spec.h"
#include "sidestream/graph_options.h"

namespace sidestream {

/// Adds the generators that `options` name to each call's generators. Each generator is there once; the default one of `device` is not.
/// Throws: UsageError for an undefined generator and for a generator of another device.
void name_generators(std::vector<CallSpec>& specs, const GraphOptions& options, c10::Device device);

/// The default generator of `device`, then all that `specs` name, each once.
[[nodiscard]] std::vector<at::Generator> generators_of(c10::ArrayRef<CallSpec> specs, c10::Device device);

}  // namespace sidestream
