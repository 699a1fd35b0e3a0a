#pragma once
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

#include "sidestream/progress.h"

namespace sidestream::cli {

/// How far a run is: one line that rewrites itself on a terminal. Elsewhere a plain line every tenth of the run (ten steps at
/// least), at the beginning of each phase before a step, and every few seconds within one.
class ProgressLine {
 public:
  using Clock = std::chrono::steady_clock;

  /// `label` stands before each line. `out` stays open as long as this lives.
  ProgressLine(std::FILE* out, std::string label, std::size_t steps, std::size_t tokens_per_step);
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  /// Ends the terminal's line.
  ~ProgressLine();

  /// Says what is done before a step or after the last.
  void phase(std::string_view text);
  /// The same of what the engine begins: "capturing blocks.3, forward (4 of 48)".
  void phase(const Progress& progress);
  /// A line that stays.
  void note(std::string_view text);
  /// Says that `done` steps are done, with a loss in nats per byte.
  void step(std::size_t done, double loss);

 private:
  /// Shows a line, later to be overwritten where that is possible.
  void show(std::string_view text, Clock::time_point now);
  [[nodiscard]] bool shown_within(double seconds, Clock::time_point now) const;

  std::FILE* out_;
  std::string label_;
  std::size_t steps_;
  std::size_t tokens_per_step_;
  bool terminal_;
  bool open_ = false;
  std::size_t plain_every_;
  std::size_t done_before_ = 0;
  Clock::time_point drawn_;    ///< the latest line
  Clock::time_point stepped_;  ///< the latest step or phase, from where the next step's time counts
  double seconds_per_step_ = 0;
};

/// What the engine begins, for people.
[[nodiscard]] std::string progress_words(const Progress& progress);
/// "1 h 02 min", "3 min 10 s", "12 s", "0.4 s".
[[nodiscard]] std::string duration_words(double seconds);

}  // namespace sidestream::cli
