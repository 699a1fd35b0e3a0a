#include "tests/cli/program.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/lsan_interface.h>
#endif
#endif

#include "tests/cli/scratch_folder.h"
#include "tools/cli/command_line.h"
#include "tools/cli/train_command.h"

extern char** environ;

namespace sidestream::cli {
namespace {

/// Where the tests were started by nohup, a hang-up is ignored, by programs that they start as well.
class HangUpsAreHeard final : public testing::Environment {
 public:
  void SetUp() override { std::signal(SIGHUP, SIG_DFL); }
};
[[maybe_unused]] testing::Environment* const hang_ups = testing::AddGlobalTestEnvironment(new HangUpsAreHeard);

/// stderr goes to an unlinked file: a pipe that nobody reads while stdout is waited for could fill and block the program.
int anonymous_file() {
  std::string name = "/tmp/sidestream-stderr-XXXXXX";
  const int descriptor = mkostemp(name.data(), O_CLOEXEC);
  unlink(name.c_str());
  return descriptor;
}

std::string whole_file(int descriptor) {
  std::string text;
  char buffer[4096];
  lseek(descriptor, 0, SEEK_SET);
  for (ssize_t n = 0; (n = read(descriptor, buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<std::size_t>(n));
  }
  return text;
}

pid_t spawn_with(const std::vector<char*>& argv, int out, int err) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err, STDERR_FILENO);
  pid_t pid = -1;
  const int failed = posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  return failed == 0 ? pid : -1;
}

/// Is else a part of a process's end.
void check_leaks() {
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
  __lsan_do_leak_check();
#endif
#endif
}

/// Threads of this process are not in the fork, so that there must be none: the program would wait for them.
pid_t fork_with(std::vector<char*> argv, int out, int err) {
  const std::filesystem::directory_iterator threads("/proc/self/task");
  if (std::distance(begin(threads), end(threads)) != 1) {
    throw std::runtime_error(
        "this process has several threads: a test before left one, and the program cannot be forked");
  }
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid != 0) {
    return pid;
  }
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  const bool trains = argv[1] != nullptr && std::string(argv[1]) == "train";
  const int code = run_command_line(static_cast<int>(argv.size()) - 1, argv.data());
  if (code == kUsage || !trains) {
    // LibTorch's end takes most of such a run's time. Trainings have it, and each program that is started as a file.
    std::fflush(nullptr);
    check_leaks();
    _exit(code);
  }
  std::exit(code);
}

}  // namespace

Program::Program(const std::vector<std::string>& arguments, const std::string& before, Start start) {
  const char* path = std::getenv("SIDESTREAM_PROGRAM");
  int pipe_ends[2];
  if (path == nullptr || pipe2(pipe_ends, O_CLOEXEC) != 0) {
    throw std::runtime_error("SIDESTREAM_PROGRAM is not set, or no pipe");
  }
  std::vector<std::string> words{path};
  if (!before.empty()) {
    words = {"/bin/sh", "-c", before + "; exec \"$0\" \"$@\"", path};
  }
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) {
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);
  out_ = pipe_ends[0];
  err_ = anonymous_file();
  pid_ = start == Start::fork ? fork_with(argv, pipe_ends[1], err_) : spawn_with(argv, pipe_ends[1], err_);
  close(pipe_ends[1]);
  if (pid_ <= 0) {
    throw std::runtime_error(std::string("cannot start ") + path);
  }
}

Program::~Program() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  close(out_);
  close(err_);
}

bool Program::read_some() {
  char buffer[4096];
  ssize_t n = 0;
  do {
    n = read(out_, buffer, sizeof buffer);
  } while (n < 0 && errno == EINTR);
  if (n > 0) {
    text_.append(buffer, static_cast<std::size_t>(n));
  }
  return n > 0;
}

bool Program::wait_for(const std::string& text) {
  while (text_.find(text) == std::string::npos) {
    if (!read_some()) {
      return false;
    }
  }
  return true;
}

void Program::signal(int number) const { kill(pid_, number); }

std::string Program::status(const std::string& name) const {
  std::ifstream lines("/proc/" + std::to_string(pid_) + "/status");
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("State:\tZ", 0) == 0) {
      return {};
    }
    if (line.rfind(name, 0) == 0) {
      return line.substr(name.size());
    }
  }
  return {};
}

bool Program::wait_until_interrupts_are_caught() const {
  for (std::string caught; !(caught = status("SigCgt:")).empty();) {
    if (((std::stoull(caught, nullptr, 16) >> (SIGINT - 1)) & 1U) != 0) {
      return true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

std::vector<int> Program::children() const {
  const std::string pid = std::to_string(pid_);
  std::ifstream file("/proc/" + pid + "/task/" + pid + "/children");
  std::vector<int> pids;
  for (int child = 0; file >> child;) {
    pids.push_back(child);
  }
  return pids;
}

bool Program::wait_for_error(const std::string& text) const {
  while (whole_file(err_).find(text) == std::string::npos) {
    if (status("State:").empty()) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

ProgramResult Program::finish() {
  while (read_some()) {
  }
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  ProgramResult result;
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  result.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  result.out = text_;
  result.err = whole_file(err_);
  return result;
}

ProgramResult run_program(const std::vector<std::string>& arguments, const std::string& before) {
  // The ranks of a pipeline start as the file of this process.
  const bool starts_ranks = std::find(arguments.begin(), arguments.end(), "--pp") != arguments.end();
  const bool fork = before.empty() && !starts_ranks;
  return Program(arguments, before, fork ? Program::Start::fork : Program::Start::file).finish();
}

std::vector<std::string> tiny_training(const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"train", "--device", "sim", "--layers",   "4", "--hidden",
                                     "32",    "--heads",  "2",   "--kv-heads", "1", "--ffn",
                                     "48",    "--seq",    "32",  "--batch",    "2"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TrainedProgram trained(std::vector<std::string> more, const std::string& before) {
  const ScratchFolder folder;
  const std::string report = (folder.path() / "report.json").string();
  more.insert(more.end(), {"--report", report});
  const ProgramResult result = run_program(tiny_training(more), before);
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  return {result.out, result.code == 0 ? nlohmann::json::parse(ScratchFolder::read(report)) : nlohmann::json()};
}

void expect_refusal(const std::vector<std::string>& arguments, int code, const std::string& part,
                    const std::string& before) {
  const ProgramResult result = run_program(arguments, before);
  EXPECT_EQ(result.code, code) << result.signal << result.out << result.err;
  EXPECT_EQ(result.err.rfind("sidestream: ", 0), 0U) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
}

std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) {
    ++count;
  }
  return count;
}

}  // namespace sidestream::cli
