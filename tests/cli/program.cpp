#include "tests/cli/program.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <thread>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace sidestream::cli {
namespace {

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

}  // namespace

Program::Program(const std::vector<std::string>& arguments) {
  const char* path = std::getenv("SIDESTREAM_PROGRAM");
  int pipe_ends[2];
  if (path == nullptr || pipe2(pipe_ends, O_CLOEXEC) != 0) {
    throw std::runtime_error("SIDESTREAM_PROGRAM is not set, or no pipe");
  }
  std::vector<char*> argv{const_cast<char*>(path)};
  for (const std::string& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  out_ = pipe_ends[0];
  err_ = anonymous_file();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err_, STDERR_FILENO);
  const int failed = posix_spawn(&pid_, path, &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_ends[1]);
  if (failed != 0) {
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

void Program::interrupt() { kill(pid_, SIGINT); }

bool Program::wait_until_interrupts_are_caught(bool caught) const {
  const std::string path = "/proc/" + std::to_string(pid_) + "/status";
  for (;;) {
    std::ifstream status(path);
    bool alive = false;
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("State:\tZ", 0) == 0) {
        return false;
      }
      if (line.rfind("SigCgt:", 0) == 0) {
        alive = true;
        if (((std::stoull(line.substr(7), nullptr, 16) >> (SIGINT - 1)) & 1U) == (caught ? 1U : 0U)) {
          return true;
        }
      }
    }
    if (!alive) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
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

ProgramResult run_program(const std::vector<std::string>& arguments) { return Program(arguments).finish(); }

}  // namespace sidestream::cli
