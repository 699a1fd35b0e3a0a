#include "graphs/guards/call_generators.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/Context.h>

#include "sidestream/error.h"

namespace sidestream {
namespace {

void add_once(std::vector<at::Generator>& all, const at::Generator& generator) {
  if (std::find(all.begin(), all.end(), generator) == all.end()) {
    all.push_back(generator);
  }
}

void check_device(const std::string& call, const at::Generator& generator, c10::Device device) {
  if (!generator.defined()) {
    throw UsageError("graphed call \"" + call +
                     "\": one of the generators named for it is undefined; name a generator of " + device.str());
  }
  if (generator.device() != device) {
    throw UsageError("graphed call \"" + call + "\": a generator of " + generator.device().str() +
                     " is named for it, but its graphs on " + device.str() +
                     " cannot draw from it; name a generator of " + device.str());
  }
}

}  // namespace

void name_generators(std::vector<CallSpec>& specs, const GraphOptions& options, c10::Device device) {
  const at::Generator& of_device = at::globalContext().defaultGenerator(device);
  for (CallSpec& spec : specs) {
    std::vector<at::Generator> named;
    for (const auto* const given : {&options.generators(), &std::as_const(spec.generators)}) {
      for (const at::Generator& generator : *given) {
        check_device(spec.name, generator, device);
        if (generator != of_device) {
          add_once(named, generator);
        }
      }
    }
    spec.generators = std::move(named);
  }
}

std::vector<at::Generator> generators_of(c10::ArrayRef<CallSpec> specs, c10::Device device) {
  std::vector<at::Generator> all{at::globalContext().defaultGenerator(device)};
  for (const CallSpec& spec : specs) {
    for (const at::Generator& generator : spec.generators) {
      add_once(all, generator);
    }
  }
  return all;
}

}  // namespace sidestream
