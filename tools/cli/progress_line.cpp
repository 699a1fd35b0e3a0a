#include "tools/cli/progress_line.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

namespace sidestream::cli {
namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr double kPlainSeconds = 5;  // between plain lines of one phase
constexpr double kSmoothing =
    0.1;  // weight of the newest step in the speed shown: capture steps are far slower than the rest

double seconds_between(ProgressLine::Clock::time_point from, ProgressLine::Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

std::string duration_words(double seconds) {
  if (seconds < 9.95) {
    return fmt::format("{:.1f} s", std::max(seconds, 0.0));
  }
  const auto whole = static_cast<long long>(seconds + 0.5);
  if (whole < 60) {
    return fmt::format("{} s", whole);
  }
  if (whole < 3600) {
    return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  }
  return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

ProgressLine::ProgressLine(std::FILE* out, std::string label, std::size_t steps, std::size_t tokens_per_step)
    : out_(out),
      label_(std::move(label)),
      steps_(steps),
      tokens_per_step_(tokens_per_step),
      terminal_(isatty(fileno(out)) == 1),
      plain_every_(std::max<std::size_t>(10, steps / 10)),
      stepped_(Clock::now()) {}

ProgressLine::~ProgressLine() {
  if (open_) {
    std::fputc('\n', out_);
    std::fflush(out_);
  }
}

std::string progress_words(const Progress& progress) {
  const auto of_call = [&](std::string_view what, std::string_view direction) {
    return fmt::format("{} {}{} ({} of {})", what, progress.name, direction, progress.index + 1, progress.count);
  };
  switch (progress.phase) {
    case ProgressPhase::warm_up:
      return of_call("warming up", "");
    case ProgressPhase::pin:
      return fmt::format("pinning {:.1f} MiB of host memory", static_cast<double>(progress.bytes) / (1 << 20));
    case ProgressPhase::capture_forward:
      return of_call("capturing", ", forward");
    case ProgressPhase::capture_backward:
      return of_call("capturing", ", backward");
    case ProgressPhase::plan:
      return fmt::format("plan: {}", progress.name);
  }
  return {};
}

void ProgressLine::phase(std::string_view text) {
  stepped_ = Clock::now();
  show(text, stepped_);
}

void ProgressLine::phase(const Progress& progress) {
  stepped_ = Clock::now();
  if (progress.phase == ProgressPhase::plan) {
    note(progress_words(progress));
  } else if (progress.index == 0 || !shown_within(terminal_ ? kRedrawSeconds : kPlainSeconds, stepped_)) {
    show(progress_words(progress), stepped_);
  }
}

void ProgressLine::note(std::string_view text) {
  std::fputs(fmt::format("{}{}\n", open_ ? "\r\x1b[K" : "", text).c_str(), out_);
  std::fflush(out_);
  open_ = false;
}

void ProgressLine::step(std::size_t done, double loss) {
  const Clock::time_point now = Clock::now();
  const double latest =
      seconds_between(stepped_, now) / static_cast<double>(std::max<std::size_t>(1, done - done_before_));
  seconds_per_step_ = done_before_ <= 2 ? latest : (1 - kSmoothing) * seconds_per_step_ + kSmoothing * latest;
  stepped_ = now;
  done_before_ = done;

  const bool last = done == steps_;
  if (terminal_ ? (open_ && !last && shown_within(kRedrawSeconds, now))
                : (done != 1 && !last && done % plain_every_ != 0)) {
    return;
  }
  const double speed = seconds_per_step_ > 0 ? static_cast<double>(tokens_per_step_) / seconds_per_step_ : 0;
  show(fmt::format("step {:>{}}/{}  loss {:.4f}  {:.0f} tokens/s  {} left", done, fmt::formatted_size("{}", steps_),
                   steps_, loss, speed, duration_words(seconds_per_step_ * static_cast<double>(steps_ - done))),
       now);
}

void ProgressLine::show(std::string_view text, Clock::time_point now) {
  std::fputs(fmt::format("{}{}  {}{}", terminal_ ? "\r" : "", label_, text, terminal_ ? "\x1b[K" : "\n").c_str(), out_);
  std::fflush(out_);
  open_ = terminal_;
  drawn_ = now;
}

bool ProgressLine::shown_within(double seconds, Clock::time_point now) const {
  return seconds_between(drawn_, now) < seconds;
}

}  // namespace sidestream::cli
