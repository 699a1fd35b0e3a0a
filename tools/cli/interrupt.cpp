#include "tools/cli/interrupt.h"

#include <csignal>

namespace sidestream::cli {
namespace {

volatile std::sig_atomic_t interrupted = 0;
struct sigaction action_before;

extern "C" void note_interrupt(int) { interrupted = 1; }

}  // namespace

InterruptGuard::InterruptGuard() {
  interrupted = 0;
  struct sigaction action {};
  action.sa_handler = note_interrupt;
  sigemptyset(&action.sa_mask);
  // SA_RESETHAND: the second signal meets the default action. SA_RESTART: file reads do not notice the first.
  action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  sigaction(SIGINT, &action, &action_before);
}

InterruptGuard::~InterruptGuard() { sigaction(SIGINT, &action_before, nullptr); }

bool InterruptGuard::requested() const noexcept { return interrupted != 0; }

}  // namespace sidestream::cli
