#include "graphs/resources/engine_resources.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "offload/name_pattern.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// The value of an environment variable; empty if it is not set.
std::string environment(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

/// `what`: "steps".
std::int64_t count_by_environment(const char* name, const char* what) {
  const std::string text = environment(name);
  if (text.empty()) {
    return 0;
  }
  char* end = nullptr;
  errno = 0;
  const long long count = std::strtoll(text.c_str(), &end, 10);
  if (*end != 0 || count < 0 || errno == ERANGE) {
    throw UsageError(std::string(name) + " is \"" + text + "\"; it must be a number of " + what + ", 0 for none");
  }
  return count;
}

double tolerance_by_environment() {
  const std::string text = environment("SIDESTREAM_VERIFY_TOLERANCE");
  if (text.empty()) {
    return 0;
  }
  char* end = nullptr;
  const double tolerance = std::strtod(text.c_str(), &end);
  if (*end != 0 || !(tolerance >= 0 && tolerance < 1)) {
    throw UsageError("SIDESTREAM_VERIFY_TOLERANCE is \"" + text +
                     "\"; it must be a part of the largest magnitude, from 0 (bit for bit) to below 1");
  }
  return tolerance;
}

void check_verification(Options& options) {
  if (options.verify_replays() == 0) {
    options.verify_replays(count_by_environment("SIDESTREAM_VERIFY_REPLAYS", "replays"));
  }
  if (options.verify_tolerance() == 0) {
    options.verify_tolerance(tolerance_by_environment());
  }
  if (options.verify_replays() < 0) {
    throw UsageError("verify_replays is negative; it must be 0 (off) or a number of replays");
  }
  if (options.verify_every() < 0) {
    throw UsageError("verify_every is negative; it must be 0 (only the first replays) or a number of replays");
  }
  if (!(options.verify_tolerance() >= 0 && options.verify_tolerance() < 1)) {
    throw UsageError("verify_tolerance is " + std::to_string(options.verify_tolerance()) +
                     "; it must be a part of the largest magnitude, from 0 (bit for bit) to below 1");
  }
}

/// The budget chooses what the options that it excludes would say. Without names all is offloaded that it asks for.
void check_device_budget(Options& options) {
  if (!options.device_budget()) {
    return;
  }
  if (options.graph_patterns().empty()) {
    throw UsageError(
        "device_budget is set without graph: the plan is made of what the graphs of ss::call save. Name these calls in "
        "Options::graph, or choose what is offloaded with Options::offload");
  }
  if (options.lag() || options.lookahead() || options.groups_in_flight() || !options.budgets().empty()) {
    throw UsageError(
        "device_budget is set together with lag, lookahead, groups_in_flight, offload_at_most or offload_fraction. The "
        "plan chooses them; leave them out, or leave out device_budget");
  }
  if (options.graph_options().agree_to_capture() != nullptr || delays_gradients(options.graph_options())) {
    throw UsageError(
        "device_budget is set together with agree_to_capture or GradientPolicy::delayed: a plan captures again by what "
        "one rank has measured, and it does not know the memory of delayed gradients. Leave them out, or choose what "
        "is offloaded with Options::offload and lag");
  }
  if (options.offload_patterns().empty()) {
    options.offload("all");
  }
}

}  // namespace

void check_graph_options(const GraphOptions& options, std::optional<c10::Stream> current) {
  if (options.side_streams() && *options.side_streams() < 1) {
    throw UsageError("side_streams is " + std::to_string(*options.side_streams()) + "; it must be at least 1");
  }
  if (options.side_streams() && options.cuda_graph_stream()) {
    throw UsageError(
        "side_streams and cuda_graph_stream are both set, but all graphs replay on cuda_graph_stream; set one of the "
        "two");
  }
  if (options.forward_only() &&
      (options.retain_graph_in_backward() || options.allow_unused_input() || !options.gradients().empty())) {
    throw UsageError(
        "forward_only is set together with retain_graph_in_backward, gradients or "
        "allow_unused_input, which concern backward. Capture twice, once for training and once for calls under "
        "no_grad");
  }
  if (options.retain_graph_in_backward() && delays_gradients(options)) {
    throw UsageError(
        "retain_graph_in_backward is set together with GradientPolicy::delayed, but backward_dw uses up what a second "
        "backward would need. Choose another policy, or run each backward once");
  }
  if (!options.order().empty() && (options.retain_graph_in_backward() || options.forward_only())) {
    throw UsageError(
        "GraphOptions::order is set together with retain_graph_in_backward or forward_only. These need memory that an "
        "order gives to other chunks after the backward. Leave them out, or capture once for each microbatch in "
        "flight");
  }
  if (options.num_warmup_iters() < 0) {
    throw UsageError("num_warmup_iters is negative; it must be 0 or more");
  }
  if (options.cuda_graph_event() != nullptr && !options.cuda_graph_stream()) {
    throw UsageError("cuda_graph_event is set without cuda_graph_stream; set the stream that the graphs replay on");
  }
  if (options.cuda_graph_event() != nullptr && options.cuda_graph_stream() == current) {
    throw UsageError(
        "cuda_graph_stream is the current stream, so cuda_graph_event would order nothing; set another stream, or no "
        "event");
  }
}

Options checked_options(Options options) {
  check_graph_options(options.graph_options());
  if (options.graph_options().forward_only()) {
    throw UsageError(
        "forward_only is set in the engine's GraphOptions, but it works only with make_graphed_callables. For ss::call "
        "set CallOptions::on_evaluation to capture");
  }
  if (!options.graph_options().order().empty()) {
    throw UsageError(
        "GraphOptions::order is set in the engine's GraphOptions, but it works only with make_graphed_callables. For "
        "ss::call give the order to OffloadEngine::step");
  }
  if (options.call_options().max_captures() < 1) {
    throw UsageError("max_captures is " + std::to_string(options.call_options().max_captures()) +
                     "; it must be at least 1");
  }
  check_device_budget(options);
  if (options.groups_in_flight() && *options.groups_in_flight() < 0) {
    throw UsageError("groups_in_flight is negative; it must be 0 or more");
  }
  if (!options.delay_patterns().empty() && options.offload_patterns().empty()) {
    throw UsageError(
        "delay is set without offload: it selects the offloaded groups whose copies wait for the next graph; name "
        "those groups in Options::offload as well");
  }
  if (!options.budgets().empty() && options.offload_patterns().empty()) {
    throw UsageError(
        "offload_at_most or offload_fraction is set without offload: it bounds what is offloaded of some groups; name "
        "those groups in Options::offload as well");
  }
  for (const Options::Budget& budget : options.budgets()) {
    if (!(budget.fraction >= 0 && budget.fraction <= 1)) {
      std::array<char, 32> digits{};  // the fewest that name the number
      std::to_chars(digits.data(), digits.data() + digits.size() - 1, budget.fraction);
      throw UsageError(std::string("offload_fraction is ") + digits.data() + " for \"" + budget.patterns +
                       "\"; it must be a part of the bytes that would be offloaded, from 0 to 1");
    }
    const auto sorted = [](const Options::Budget& of) {
      std::vector<std::string> patterns = NamePatterns::parse(of.patterns).patterns();
      std::sort(patterns.begin(), patterns.end());
      return patterns;
    };
    const auto same = [&](const Options::Budget& other) { return sorted(other) == sorted(budget); };
    if (std::count_if(options.budgets().begin(), options.budgets().end(), same) > 1) {
      throw UsageError("\"" + budget.patterns +
                       "\" has two budgets, and only the first would count: call offload_at_most or offload_fraction "
                       "once for these groups");
    }
  }
  if (options.check_steps() == 0) {
    options.check_steps(count_by_environment("SIDESTREAM_CHECK_STEPS", "steps"));
  }
  if (options.check_steps() < 0) {
    throw UsageError("check_steps is negative; it must be 0 (off) or a number of steps");
  }
  check_verification(options);
  if (const std::string find = environment("SIDESTREAM_FIND_SYNCS"); find == "1") {
    options.find_syncs(true);
  } else if (!find.empty() && find != "0") {
    throw UsageError("SIDESTREAM_FIND_SYNCS is \"" + find + "\"; it must be 1, to find what makes the host wait, or 0");
  }
  return options;
}

}  // namespace sidestream
