#include "graphs/resources/engine_resources.h"

#include <exception>
#include <limits>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "offload/autograd_engine.h"
#include "runtime/host_limit.h"
#include "runtime/link_speed.h"

namespace sidestream {
namespace {

NamePatterns patterns_of(const std::vector<std::string>& lists) {
  std::vector<std::string> all;
  for (const std::string& list : lists) {
    const NamePatterns parsed = NamePatterns::parse(list);
    all.insert(all.end(), parsed.patterns().begin(), parsed.patterns().end());
  }
  return NamePatterns(std::move(all));
}

std::vector<NamedBudget> budgets_of(const Options& options) {
  std::vector<NamedBudget> budgets;
  for (const Options::Budget& given : options.budgets()) {
    budgets.push_back({NamePatterns::parse(given.patterns), {given.bytes, given.fraction}});
  }
  return budgets;
}

/// If the user sets no cap: four fifths of the available memory. Beyond that the system may end processes without a message.
std::size_t host_cap_of(const Options& options) {
  constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  return options.host_cap() != kNone ? options.host_cap() : host_bytes_left().value_or(kNone) / 5 * 4;
}

CopyLimits limits_of(const Options& options) {
  CopyLimits limits{options.lag(), options.lookahead()};
  if (options.groups_in_flight()) {
    limits.groups_in_flight = static_cast<std::size_t>(*options.groups_in_flight());
  }
  return limits;
}

}  // namespace

EngineResources::EngineResources(torch::nn::Module& given_model, Options given, std::shared_ptr<Runtime> given_runtime)
    : model(given_model),
      options(checked_options(std::move(given))),
      graphed(patterns_of(options.graph_patterns())),
      check(given_runtime != nullptr ? std::move(given_runtime) : make_runtime(options.device()),
            options.check_steps()),
      runtime(check.runtime()),
      arena(std::make_shared<HostArena>(*runtime, host_cap_of(options))),
      tree(patterns_of(options.offload_patterns()), patterns_of(options.delay_patterns()), budgets_of(options)),
      exclusions(runtime->device(), options.min_bytes()),
      capture_stream(runtime->create_stream()),
      mover(std::make_shared<GroupMover>(runtime, arena)),
      capture_offload(std::make_shared<CaptureOffload>(runtime, mover)),
      eager(std::make_shared<EagerOffload>(runtime, mover, limits_of(options))),
      rest(std::make_shared<EagerMemoryEstimate>(runtime)),
      syncs(options.find_syncs() ? std::make_unique<StepSyncs>(runtime->device().type()) : nullptr) {
  runtime->check_settings(/*graphs=*/!graphed.empty());
  install_autograd_engine();
  learn_registered();
}

void EngineResources::learn_registered() {
  std::vector<at::Tensor> tensors = model.parameters();
  const std::vector<at::Tensor> buffers = model.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  exclusions.set_parameters(std::move(tensors));
}

std::optional<LinkPace> EngineResources::link() {
  constexpr std::size_t kBytes = std::size_t{16} << 20;
  constexpr double kGigabyte = 1e9;
  const bool asked = !options.offload_patterns().empty() && (!options.lag() || !options.lookahead());
  if (!link_measured_ && asked && runtime->keeps_time()) {
    link_measured_ = true;
    try {
      const LinkSpeed speed = link_speed(*runtime, kBytes);
      link_ = {speed.to_host * kGigabyte, speed.to_device * kGigabyte};
    } catch (const std::exception&) {  // no room for it: what is planned then is as good as it can be
    }
  }
  return link_;
}

}  // namespace sidestream
