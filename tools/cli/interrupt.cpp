#include "tools/cli/interrupt.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <string_view>

#include <unistd.h>

namespace sidestream::cli {
namespace {

struct Caught {
  int signal;
  const char* words;
  std::string_view note;
};
constexpr std::array kCaught{
    Caught{SIGINT, "Ctrl-C", "sidestream: Ctrl-C: the run ends after this step; a second Ctrl-C ends it immediately\n"},
    Caught{SIGTERM, "SIGTERM",
           "sidestream: SIGTERM: the run ends after this step; a second SIGTERM ends it immediately\n"},
    Caught{SIGHUP, "SIGHUP", "sidestream: SIGHUP: the run ends after this step; SIGTERM ends it immediately\n"}};

// A signal handler reads these: lock-free, so that it may.
std::atomic<int> noted = 0;
std::atomic<const char*> unfinished = nullptr;
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<const char*>::is_always_lock_free);
std::array<struct sigaction, kCaught.size()> actions_before;

extern "C" void note_signal(int signal) {
  const int errno_before = errno;
  int none = 0;
  if (noted.compare_exchange_strong(none, signal)) {
    for (const Caught& caught : kCaught) {
      if (caught.signal == signal) {
        [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, caught.note.data(), caught.note.size());
      }
    }
  } else if (signal != SIGHUP) {
    if (const char* path = unfinished.load(); path != nullptr) {
      unlink(path);
    }
    std::signal(signal, SIG_DFL);
    std::raise(signal);  // delivered when this handler returns
  }
  errno = errno_before;
}

}  // namespace

InterruptGuard::InterruptGuard() {
  noted = 0;
  struct sigaction action {};
  action.sa_handler = note_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // file reads do not notice the first
  for (std::size_t i = 0; i < kCaught.size(); ++i) {
    sigaction(kCaught[i].signal, nullptr, &actions_before[i]);
    if (actions_before[i].sa_handler != SIG_IGN) {
      sigaction(kCaught[i].signal, &action, nullptr);
    }
  }
}

InterruptGuard::~InterruptGuard() {
  for (std::size_t i = 0; i < kCaught.size(); ++i) {
    sigaction(kCaught[i].signal, &actions_before[i], nullptr);
  }
}

int InterruptGuard::signal() const noexcept { return noted; }

const char* signal_words(int signal) noexcept {
  for (const Caught& caught : kCaught) {
    if (caught.signal == signal) {
      return caught.words;
    }
  }
  return "a signal";
}

RemovedBySignal::RemovedBySignal(const char* path) noexcept { unfinished = path; }

RemovedBySignal::~RemovedBySignal() { unfinished = nullptr; }

}  // namespace sidestream::cli
