#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "sidestream/version.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/trained_model.h"
#include "tools/cli/training_result.h"

namespace sidestream::cli {
namespace {

// Keys keep the order in which they are written: a report is read by people too.
using Json = nlohmann::ordered_json;

Json options_json(const TrainingOptions& options) {
  Json json{{"device", options.device},
            {"model", options.model},
            {"layers", options.shape.layers},
            {"hidden", options.shape.hidden},
            {"heads", options.shape.heads},
            {"kv_heads", options.shape.kv_heads},
            {"ffn", options.shape.ffn},
            {"seq", options.shape.seq},
            {"batch", options.batch},
            {"microbatches", options.microbatches},
            {"dtype", options.dtype},
            {"steps", options.steps},
            {"seed", options.seed},
            {"offload", fmt::format("{}", fmt::join(options.offload, ","))},
            {"graphs", options.graph_mode()},
            {"side_streams", options.side_streams ? Json(*options.side_streams) : Json()},
            {"device_budget_mib", options.device_budget_mib ? Json(*options.device_budget_mib) : Json()},
            {"lag_mib", options.lag_mib ? Json(*options.lag_mib) : Json()},
            {"lookahead_mib", options.lookahead_mib ? Json(*options.lookahead_mib) : Json()},
            {"schedule", options.schedule},
            {"check_steps", options.check_steps},
            {"verify_replays", options.verify_replays},
            {"find_syncs", options.find_syncs}};
  if (options.pp) {
    json["pp"] = *options.pp;
    json["vpp"] = options.vpp;
    json["dw"] = options.delay_weight_gradients;
  }
  if (options.mixture()) {
    const MixtureShape shape = mixture_shape(options);
    json["experts"] = shape.experts;
    json["top_k"] = shape.top_k;
    json["capacity"] = shape.capacity;
  }
  if (options.graph_mode() == "partial") {
    json["delay"] = !delay_patterns(options).empty();
  }
  return json;
}

Json mode_json(const TrainingResult& result, const ModeResult& mode) {
  const auto peak = [&](std::int64_t bytes) { return mode.has_peaks() ? Json(bytes) : Json(); };
  Json json{{"name", mode.name},
            {"timed_steps", mode.steps},
            {"step_seconds_median", mode.steps > 0 ? Json(mode.step_seconds) : Json()},
            {"peak_live_bytes", peak(mode.live)},
            {"peak_allocated_bytes", peak(mode.allocated)},
            {"peak_reserved_bytes", peak(mode.reserved)},
            {"peak_reserved_bytes_first_steps", mode.first_reserved > 0 ? Json(mode.first_reserved) : Json()},
            {"offloaded_bytes_per_step", mode.offload.bytes_per_step},
            {"in_flight_bytes_at_peak", mode.offload.in_flight},
            {"pinned_host_bytes", mode.offload.pinned_bytes},
            {"stream_waits_per_step", mode.offload.waits_per_step},
            {"graphs", mode.offload.graphs},
            {"forecast_peak_live_bytes", mode.offload.forecast_peak},
            {"forecast_step_seconds", mode.offload.forecast_seconds},
            {"notes", mode.offload.notes}};
  if (const std::optional<double> reduction = result.gross_reduction(mode)) {
    json["r_gross"] = *reduction;
  }
  if (const std::optional<double> reduction = result.net_reduction(mode)) {
    json["r_net"] = *reduction;
  }
  return json;
}

Json comparison_json(const TrainingResult& result) {
  const GradientComparison& comparison = *result.comparison;
  Json parameters = Json::array();
  for (const GradientComparison::Parameter& parameter : comparison.parameters()) {
    parameters.push_back({{"name", parameter.name},
                          {"differing_steps", parameter.differing_steps},
                          {"worst_relative_error", parameter.worst_error}});
  }
  return {{"steps", comparison.steps()},
          {"bit_equal", comparison.all_equal()},
          {"bound", comparison.bound()},
          {"within_bound", comparison.within_bound()},
          {"trained_parameters_equal", result.parameters_equal},
          {"explanation", comparison.explanation()},
          {"parameters", std::move(parameters)}};
}

Json syncs_json(const SyncNumbers& syncs) {
  Json places = Json::array();
  for (const SyncFinding& sync : syncs.places) {
    places.push_back({{"kind", sync.kind},
                      {"operation", sync.operation},
                      {"call", sync.call},
                      {"scope", sync.scope},
                      {"node", sync.node},
                      {"count", sync.count},
                      {"stack", sync.stack},
                      {"remedy", sync.remedy}});
  }
  return {{"found", syncs.found}, {"unlisted", syncs.unlisted}, {"notes", syncs.notes}, {"places", std::move(places)}};
}

}  // namespace

std::string result_json(const TrainingResult& result) {
  const auto of_steps = [&](double loss) { return result.steps_done > 0 ? Json(loss) : Json(); };
  Json json{{"program", "sidestream train"},
            {"version", version()},
            {"options", options_json(result.options)},
            {"device", result.device_name},
            {"text",
             {{"source", result.text_source},
              {"files", result.text_files},
              {"bytes", result.text_bytes},
              {"byte_entropy_nats", result.byte_entropy}}},
            {"parameters", result.parameters},
            {"mode", result.mode},
            {"steps_done", result.steps_done},
            {"interrupted", result.signal != 0},
            {"ended_by", result.signal != 0 ? signal_words(result.signal) : ""},
            {"train_loss", {{"first", of_steps(result.train.first)}, {"last", of_steps(result.train.last)}}},
            {"held_out_loss", {{"first", result.held_out.first}, {"last", result.held_out.last}}},
            {"modes", Json::array()}};
  if (result.options.pp) {
    json.erase("held_out_loss");  // not measured
  }
  for (const ModeResult& mode : result.modes) {
    json["modes"].push_back(mode_json(result, mode));
  }
  if (result.order.operations > 0) {
    json["order"] = {{"operations", result.order.operations}, {"findings", result.order.findings}};
  }
  if (result.verified.forwards > 0) {
    json["verified"] = {{"forwards", result.verified.forwards},
                        {"backwards", result.verified.backwards},
                        {"tolerance", result.verified.tolerance}};
  }
  if (result.syncs) {
    json["syncs"] = syncs_json(*result.syncs);
  }
  if (result.comparison) {
    json["gradients"] = comparison_json(result);
  }
  return json.dump(2) + "\n";
}

}  // namespace sidestream::cli
