#include "tools/cli/simulate_files.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "sidestream/version.h"
#include "tools/cli/pipeline_picture.h"

namespace sidestream::cli {
namespace {

// Keys keep the order in which they are written: people read the files too.
using Json = nlohmann::ordered_json;

constexpr std::int64_t kThinRow = 7;        // pixels
constexpr std::int64_t kLongestRow = 4000;  // pixels

constexpr const char* kStyles = R"(  .host { fill: #fb8f44; }
  .device { fill: #d4a72c; }
  .memory { fill: #1f2328; }
  .line { fill: none; stroke: #1f2328; }
)";

enum Thread : std::uint8_t { compute = 1, to_host = 2, to_device = 3 };

Json name_event(const char* what, std::int64_t rank, int thread, const std::string& name) {
  return {{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", thread}, {"args", {{"name", name}}}};
}

/// Rounded to ns, so that what follows immediately does not overlap.
double microseconds(double seconds) { return std::round(seconds * 1e9) / 1e3; }

Json span_event(std::int64_t rank, int thread, std::string name, double begin, double end, Json arguments) {
  const double at = microseconds(begin);
  return {{"ph", "X"},
          {"name", std::move(name)},
          {"pid", rank},
          {"tid", thread},
          {"ts", at},
          {"dur", microseconds(end) - at},
          {"args", std::move(arguments)}};
}

std::string name_of(const PipelineStep& step) {
  const char* work = step.kind == PipelineStep::Kind::forward    ? "forward"
                     : step.kind == PipelineStep::Kind::backward ? "backward"
                                                                 : "weight gradients";
  return fmt::format("{} {}", work, step.microbatch);
}

void add_rank(Json& events, std::int64_t rank, const RankForecast& forecast) {
  events.push_back(name_event("process_name", rank, compute, fmt::format("rank {}", rank)));
  events.push_back(name_event("thread_name", rank, compute, "compute"));
  events.push_back(name_event("thread_name", rank, to_host, "copies to the host"));
  events.push_back(name_event("thread_name", rank, to_device, "copies to the device"));
  for (const ForecastStep& timed : forecast.steps) {
    events.push_back(span_event(rank, compute, name_of(timed.step), timed.begin, timed.end,
                                {{"virtual stage", timed.step.stage}, {"waited for copies, ms", 1e3 * timed.waited}}));
  }
  const auto add_copies = [&](int thread, const char* work, const std::vector<ForecastCopy>& copies) {
    for (const ForecastCopy& copy : copies) {
      events.push_back(span_event(rank, thread, fmt::format("{} {}", work, copy.microbatch), copy.begin, copy.end,
                                  {{"virtual stage", copy.stage}, {"layer", copy.layer}}));
    }
  };
  add_copies(to_host, "offload", forecast.to_host);
  add_copies(to_device, "reload", forecast.to_device);
  for (const ForecastMemory& memory : forecast.live) {
    events.push_back({{"ph", "C"},
                      {"name", "live memory"},
                      {"pid", rank},
                      {"ts", microseconds(memory.time)},
                      {"args", {{"MiB", static_cast<double>(memory.bytes) / (1 << 20)}}}});
  }
}

/// Pixels of a second: the shortest step of an order has room for its number, if the picture does not become too wide.
double scale_of(const SimulatedRanks& simulated) {
  const double seconds = simulated.ranks.front().seconds;
  double shortest = seconds;
  for (const RankForecast& rank : simulated.ranks) {
    for (const ForecastStep& timed : rank.steps) {
      shortest = std::min(shortest, timed.end - timed.begin);
    }
  }
  if (seconds == 0) {
    return 0;
  }
  const double longest = static_cast<double>(kLongestRow) / seconds;
  return shortest > 0 ? std::min(longest, static_cast<double>(pixels_of_unit(simulated.shape)) / shortest) : longest;
}

}  // namespace

std::string trace_of(const SimulatedRanks& simulated) {
  Json events = Json::array();
  for (std::size_t i = 0; i < simulated.ranks.size(); ++i) {
    add_rank(events, simulated.first + static_cast<std::int64_t>(i), simulated.ranks[i]);
  }
  return Json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}.dump() + "\n";
}

std::string json_of(const SimulatedRanks& simulated, const PipelineCosts& costs) {
  const PipelineShape& shape = simulated.shape;
  Json ranks = Json::array();
  for (std::size_t i = 0; i < simulated.ranks.size(); ++i) {
    const RankForecast& rank = simulated.ranks[i];
    ranks.push_back({{"rank", simulated.first + static_cast<std::int64_t>(i)},
                     {"step_seconds", rank.seconds},
                     {"busy_seconds", rank.busy_seconds},
                     {"idle_seconds", rank.idle_seconds},
                     {"waited_seconds", rank.waited_seconds},
                     {"peak_bytes", rank.peak_bytes},
                     {"peak_bytes_without_offload", rank.peak_bytes_without_offload},
                     {"offloaded_bytes", rank.offloaded_bytes}});
  }
  const auto given = [](const std::optional<std::int64_t>& bytes) { return bytes ? Json(*bytes) : Json(); };
  const Json all{{"version", version()},
                 {"pp", shape.ranks},
                 {"vpp", shape.stages},
                 {"microbatches", shape.microbatches},
                 {"group", shape.group},
                 {"dw", shape.delay_weight_gradients},
                 {"costs",
                  {{"layers", costs.layers},
                   {"forward_seconds", costs.forward_seconds},
                   {"backward_seconds", costs.backward_seconds},
                   {"weights_seconds", costs.weights_seconds},
                   {"send_seconds", costs.send_seconds},
                   {"saved_bytes", costs.saved_bytes},
                   {"offloadable_bytes", costs.offloadable_bytes},
                   {"for_weights_bytes", costs.for_weights_bytes},
                   {"chunk_bytes", costs.chunk_bytes},
                   {"forward_more_bytes", costs.forward_more_bytes},
                   {"backward_more_bytes", costs.backward_more_bytes},
                   {"to_host", costs.to_host},
                   {"to_device", costs.to_device},
                   {"lag", given(costs.lag)},
                   {"lookahead", given(costs.lookahead)}}},
                 {"ranks", std::move(ranks)}};
  return all.dump(2) + "\n";
}

std::string picture_of(const SimulatedRanks& simulated, const std::string& title, const std::string& words) {
  const double scale = scale_of(simulated);
  const auto pixel = [scale](double seconds) { return static_cast<std::int64_t>(std::llround(scale * seconds)); };
  std::int64_t most = 1;
  for (const RankForecast& rank : simulated.ranks) {
    most = std::max(most, rank.peak_bytes);
  }
  PipelinePicture picture{
      title, words, kStyles, pixel(simulated.ranks.front().seconds), simulated.shape.stages, keys_of(simulated.shape),
      {}};
  picture.keys.push_back({"host", "copy to the host", 130});
  picture.keys.push_back({"device", "to the device", 110});
  picture.keys.push_back({"memory", "live memory", 105});
  const std::int64_t unit = pixels_of_unit(simulated.shape);
  for (std::size_t i = 0; i < simulated.ranks.size(); ++i) {
    const RankForecast& rank = simulated.ranks[i];
    PictureRow work{fmt::format("rank {}", simulated.first + static_cast<std::int64_t>(i)), kPictureRow, {}, {}};
    for (const ForecastStep& timed : rank.steps) {
      PictureBar bar = bar_of(timed.step, simulated.shape, pixel(timed.begin), pixel(timed.end));
      bar.number = bar.end - bar.begin < unit - 4 ? "" : bar.number;
      work.bars.push_back(std::move(bar));
    }
    picture.rows.push_back(std::move(work));
    for (const auto& [style, copies] : {std::pair("host", &rank.to_host), std::pair("device", &rank.to_device)}) {
      PictureRow& row = picture.rows.emplace_back(PictureRow{{}, kThinRow, {}, {}});
      for (const ForecastCopy& copy : *copies) {
        row.bars.push_back({pixel(copy.begin), pixel(copy.end), style, 1, {}});
      }
    }
    PictureRow& memory = picture.rows.emplace_back(PictureRow{{}, kPictureRow, {}, {{0, 0}}});
    for (const ForecastMemory& at : rank.live) {
      memory.line.emplace_back(pixel(at.time), memory.line.back().second);
      memory.line.emplace_back(pixel(at.time), static_cast<double>(at.bytes) / static_cast<double>(most));
    }
  }
  return svg_of(picture);
}

}  // namespace sidestream::cli
