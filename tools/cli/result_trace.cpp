// The traced steps of a training in one file.
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "sidestream/error.h"
#include "tools/cli/training_result.h"

namespace sidestream::cli {

std::string result_trace(const TrainingResult& result) {
  nlohmann::json merged = {{"displayTimeUnit", "ms"}, {"traceEvents", nlohmann::json::array()}};
  int process = 0;
  for (const ModeResult& mode : result.modes) {
    if (mode.trace.empty()) {
      continue;
    }
    ++process;
    nlohmann::json trace = nlohmann::json::parse(mode.trace);
    for (nlohmann::json& event : trace["traceEvents"]) {
      event["pid"] = process;
      if (event["name"] == "process_name") {
        std::string& name = event["args"]["name"].get_ref<std::string&>();
        name = mode.name + ", " + name;
      }
      merged["traceEvents"].push_back(std::move(event));
    }
  }
  if (process == 0) {
    if (result.signal != 0) {
      return {};
    }
    throw Error("--trace: no step was traced; the second step after the latest captures is, so ask for more --steps");
  }
  return merged.dump();
}

}  // namespace sidestream::cli
