#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sidestream/report.h"
#include "tools/cli/gradient_comparison.h"
#include "tools/cli/training_options.h"

namespace sidestream::cli {

/// What the engine says of the activations that a step offloads.
struct OffloadNumbers {
  std::int64_t bytes_per_step = 0;
  std::int64_t in_flight = 0;  ///< of those, on the device at the peak of live memory
  std::int64_t pinned_bytes = 0;
  std::int64_t waits_per_step = 0;
  std::int64_t graphs = 0;
  std::int64_t forecast_peak = 0;  ///< of live memory, by the plan for a budget; 0: no plan
  double forecast_seconds = 0;     ///< of a step; 0: no plan, or no clock
  std::vector<std::string> notes;  ///< what the engine kept on the device, and why
};

/// What the order check found.
struct OrderNumbers {
  std::int64_t operations = 0;        ///< journaled; 0: nothing was checked
  std::vector<std::string> findings;  ///< one line each
};

/// Replays that were compared with eager runs and did not differ: a difference ends the training.
struct VerifiedNumbers {
  std::int64_t forwards = 0;
  std::int64_t backwards = 0;
  double tolerance = 0;  ///< as a part of a tensor's largest magnitude; 0: bit for bit
};

/// What made the host wait in steps.
struct SyncNumbers {
  std::int64_t found = 0;
  std::int64_t unlisted = 0;  ///< of those, not among `places`
  std::vector<SyncFinding> places;
  std::vector<std::string> notes;  ///< what could not be heard of
};

/// One mode, run by itself: nothing else lives on the device.
struct ModeResult {
  std::string name;
  std::int64_t steps = 0;   ///< steps that were timed, after sizing and capture
  double step_seconds = 0;  ///< median
  // Peaks over the timed steps, bytes; see MemoryUse.
  std::int64_t live = 0;
  std::int64_t allocated = 0;
  std::int64_t reserved = 0;
  std::int64_t first_reserved = 0;  ///< peak over the first steps: sizing, and the first replays, bytes
  OffloadNumbers offload;
  std::string trace = {};  ///< of one step, in the Trace Event Format; empty: none

  /// False if the training ended within the first steps: there are no peaks then.
  [[nodiscard]] bool has_peaks() const noexcept { return live > 0; }
};

/// First and last value of a loss, nats per byte.
struct LossPair {
  double first = 0;
  double last = 0;
};

/// What `sidestream train` found out; the closing table and the report file are made of it.
struct TrainingResult {
  TrainingOptions options;
  OrderNumbers order;
  VerifiedNumbers verified;
  std::optional<SyncNumbers> syncs;  ///< none where they were not looked for
  std::string device_name;
  std::string text_source;
  std::size_t text_files = 0;
  std::size_t text_bytes = 0;
  double byte_entropy = 0;
  std::int64_t parameters = 0;

  std::string mode;  ///< name of the mode that trained
  std::int64_t steps_done = 0;
  int signal = 0;  ///< that ended the run early; 0: none
  LossPair train;
  LossPair held_out;
  std::vector<ModeResult> modes;
  std::optional<GradientComparison> comparison;
  bool parameters_equal = false;  ///< after the last compared step; with `comparison` only

  [[nodiscard]] const ModeResult* find(const std::string& name) const noexcept;
  /// By how many bytes offload lowers the peak of live memory. Not set if the same mode without offload was not measured, or if
  /// nothing was offloaded.
  [[nodiscard]] std::optional<std::int64_t> saved_bytes(const ModeResult& mode) const;
  /// R: those bytes over the bytes offloaded in a step (gross), or over the bytes that were not in flight at the peak (net).
  [[nodiscard]] std::optional<double> gross_reduction(const ModeResult& mode) const;
  [[nodiscard]] std::optional<double> net_reduction(const ModeResult& mode) const;

 private:
  [[nodiscard]] std::optional<double> reduction(const ModeResult& mode, std::int64_t bytes) const;
};

/// The closing table, ends with a newline.
[[nodiscard]] std::string result_table(const TrainingResult& result);
/// The traced steps of all modes in one file of the Trace Event Format, a process for each. Empty if a signal ended the training before a
/// step was traced. Throws: Error if no step was traced without that.
[[nodiscard]] std::string result_trace(const TrainingResult& result);
/// The closing table as JSON text, with bytes, seconds and nats as plain numbers. What was not measured is null.
[[nodiscard]] std::string result_json(const TrainingResult& result);

}  // namespace sidestream::cli
