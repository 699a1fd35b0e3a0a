#include "ranks.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <sidestream/error.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace ss = sidestream;

namespace pipeline {
namespace {

constexpr std::chrono::seconds kGrace{10};
constexpr int kSignalled = 128;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) {
    throw ss::UsageError(std::string("RANK is set, but ") + name +
                         " is not; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none to start all ranks here");
  }
  return value;
}

int number(const char* name, int least, int most) {
  const std::string text = variable(name);
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < least || value > most) {
    throw ss::UsageError(std::string(name) + " is '" + text + "'; it must be a number from " + std::to_string(least) +
                         " to " + std::to_string(most));
  }
  return static_cast<int>(value);
}

/// The strings of `texts` for a C function; they must outlive the result.
std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  std::transform(texts.begin(), texts.end(), std::back_inserter(result), [](std::string& text) { return text.data(); });
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) {
    arguments.push_back(std::move(argument));
  }
  return arguments;
}

std::vector<std::string> environment_of(int rank, int size, std::uint16_t port) {
  std::vector<std::string> variables{"RANK=" + std::to_string(rank),        "LOCAL_RANK=" + std::to_string(rank),
                                     "WORLD_SIZE=" + std::to_string(size),  "MASTER_ADDR=127.0.0.1",
                                     "MASTER_PORT=" + std::to_string(port), "TORCHELASTIC_USE_AGENT_STORE=True"};
  const std::size_t ours = variables.size();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const bool replaced = std::any_of(variables.begin(), variables.begin() + static_cast<std::ptrdiff_t>(ours),
                                      [&](const std::string& own) {
                                        const std::size_t name = own.find('=') + 1;
                                        return text.compare(0, name, own, 0, name) == 0;
                                      });
    if (!replaced) {
      variables.push_back(text);
    }
  }
  return variables;
}

/// The processes of the ranks. Those that still run at its end are killed.
class Processes {
 public:
  Processes() = default;
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;
  ~Processes() {
    signal_all(SIGKILL);
    for (const pid_t pid : pids_) {
      if (pid > 0) {
        waitpid(pid, nullptr, 0);
      }
    }
  }

  /// In a process group of its own: a terminal's Ctrl-C goes to this process alone.
  void start(std::vector<std::string> arguments, std::vector<std::string> variables, const sigset_t& mask) {
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setsigmask(&attributes, &mask);
    pid_t pid = 0;
    const int failed = posix_spawn(&pid, "/proc/self/exe", nullptr, &attributes, pointers(arguments).data(),
                                   pointers(variables).data());
    posix_spawnattr_destroy(&attributes);
    if (failed != 0) {
      throw ss::Error("rank " + std::to_string(pids_.size()) + " cannot be started: " + std::strerror(failed));
    }
    pids_.push_back(pid);
  }

  void signal_rank(std::size_t rank, int number) const {
    if (pids_[rank] > 0) {
      kill(pids_[rank], number);
    }
  }
  void signal_all(int number) const {
    for (std::size_t rank = 0; rank < pids_.size(); ++rank) {
      signal_rank(rank, number);
    }
  }
  [[nodiscard]] bool any() const {
    return std::any_of(pids_.begin(), pids_.end(), [](pid_t pid) { return pid > 0; });
  }

  /// Takes note of those that have ended. Returns true when `end` has its first failure.
  bool collect(RanksEnd& end) {
    const bool failed_before = !end.failed.empty();
    for (std::size_t rank = 0; rank < pids_.size(); ++rank) {
      int status = 0;
      const pid_t ended = pids_[rank] > 0 ? waitpid(pids_[rank], &status, WNOHANG) : 0;
      if (ended == 0 || (ended < 0 && errno == EINTR)) {
        continue;
      }
      const std::string name = "rank " + std::to_string(rank) + " (process " + std::to_string(pids_[rank]) + ")";
      pids_[rank] = 0;
      const int code = ended < 0 || WIFSIGNALED(status) ? 1 : WEXITSTATUS(status);
      end.code = std::max(end.code, code);
      if (end.failed.empty() && WIFSIGNALED(status)) {
        end.failed = name + " was ended by signal " + std::to_string(WTERMSIG(status)) + " (" +
                     strsignal(WTERMSIG(status)) + ")";
      } else if (end.failed.empty() && code != 0 && code <= kSignalled) {
        end.failed = name + " ended with exit code " + std::to_string(code);
      }
    }
    return !failed_before && !end.failed.empty();
  }

 private:
  std::vector<pid_t> pids_;  ///< by rank; 0: ended
};

}  // namespace

std::optional<RankEnvironment> rank_environment() {
  if (std::getenv("RANK") == nullptr) {
    return std::nullopt;
  }
  RankEnvironment place;
  place.size = number("WORLD_SIZE", 1, 1 << 16);
  place.rank = number("RANK", 0, place.size - 1);
  place.local = std::getenv("LOCAL_RANK") == nullptr ? place.rank : number("LOCAL_RANK", 0, place.size - 1);
  place.address = variable("MASTER_ADDR");
  place.port = static_cast<std::uint16_t>(number("MASTER_PORT", 1, 65535));
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  place.serves_store = place.rank == 0 && (agent == nullptr || std::string_view(agent) != "True");
  return place;
}

c10::intrusive_ptr<c10d::Store> connect(const RankEnvironment& place, std::chrono::milliseconds limit) {
  c10d::TCPStoreOptions options;
  options.port = place.port;
  options.isServer = place.serves_store;
  options.waitWorkers = false;
  options.timeout = limit;
  try {
    return c10::make_intrusive<c10d::TCPStore>(place.address, options);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw ss::Error("rank " + std::to_string(place.rank) + (place.serves_store ? " cannot serve" : " cannot reach") +
                    " the store at " + place.address + ":" + std::to_string(place.port) +
                    " (MASTER_ADDR, MASTER_PORT): " + text.substr(0, text.find('\n')));
  }
}

RanksEnd run_ranks(int size) {
  if (size < 1) {
    throw ss::UsageError("a pipeline of " + std::to_string(size) + " ranks; give it at least 1");
  }
  (void)std::signal(SIGCHLD, SIG_DFL);  // where it is ignored, no process can be waited for
  sigset_t signals;
  sigset_t mask_before;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) {
    sigaddset(&signals, signal);
  }
  pthread_sigmask(SIG_BLOCK, &signals, &mask_before);

  c10d::TCPStoreOptions options;
  options.port = 0;  // any that is free
  options.isServer = true;
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  Processes processes;
  for (int rank = 0; rank < size; ++rank) {
    processes.start(own_arguments(), environment_of(rank, size, store->getPort()), mask_before);
  }

  RanksEnd end;
  bool interrupted = false;
  int killed_by = 0;
  std::optional<std::chrono::steady_clock::time_point> failed_at;
  while (processes.any()) {
    const timespec wait{1, 0};
    const int signal = sigtimedwait(&signals, nullptr, &wait);
    if (signal > 0 && signal != SIGCHLD) {
      if (!interrupted) {
        processes.signal_rank(0, signal);
      } else if (signal != SIGHUP) {  // a terminal that closes sends several
        processes.signal_all(signal);
        killed_by = signal;
      }
      interrupted = true;
    }
    if (processes.collect(end)) {
      failed_at = std::chrono::steady_clock::now();
      (void)static_cast<c10d::Store&>(*store).compareSet("failure", std::string(), end.failed);
    }
    if (failed_at && std::chrono::steady_clock::now() - *failed_at > kGrace) {
      processes.signal_all(SIGKILL);
    }
  }
  pthread_sigmask(SIG_SETMASK, &mask_before, nullptr);
  return killed_by != 0 ? RanksEnd{kSignalled + killed_by, {}} : end;
}

}  // namespace pipeline
