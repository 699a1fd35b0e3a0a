#pragma once
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

namespace sidestream::cli {

/// How far a run is: one line that rewrites itself on a terminal, a plain line every tenth of the run (ten steps at
/// least) elsewhere.
class ProgressLine {
 public:
  using Clock = std::chrono::steady_clock;

  /// `label` stands before each line. `out` stays open as long as this lives.
  ProgressLine(std::FILE* out, std::string label, std::size_t steps, std::size_t tokens_per_step);
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  /// Ends the terminal's line.
  ~ProgressLine();

  /// Says that `done` steps are done, with a loss in nats per byte.
  void step(std::size_t done, double loss);

 private:
  void rewrite(std::string_view text);

  std::FILE* out_;
  std::string label_;
  std::size_t steps_;
  std::size_t tokens_per_step_;
  bool terminal_;
  bool open_ = false;
  std::size_t plain_every_;
  std::size_t done_before_ = 0;
  Clock::time_point drawn_;
  Clock::time_point stepped_;
  double seconds_per_step_ = 0;
};

/// "1 h 02 min", "3 min 10 s", "12 s", "0.4 s".
[[nodiscard]] std::string duration_words(double seconds);

}  // namespace sidestream::cli
