#pragma once
#include <string>
#include <vector>

namespace sidestream::cli {

/// What a run of the built program left behind.
struct ProgramResult {
  int code = -1;   ///< exit code; -1 when a signal ended it
  int signal = 0;  ///< that signal
  std::string out;
  std::string err;
};

/// The program under test as a process of its own, its output captured.
class Program {
 public:
  /// Starts it. The path is in the environment variable SIDESTREAM_PROGRAM.
  explicit Program(const std::vector<std::string>& arguments);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  /// Kills it if it still runs.
  ~Program();

  /// Reads stdout until `text` was seen; false when the program closed it before.
  bool wait_for(const std::string& text);
  void interrupt();
  /// Waits until it has a handler for interrupts, or has none any more; false when it ended before.
  bool wait_until_interrupts_are_caught(bool caught) const;
  /// Waits for its end.
  ProgramResult finish();

 private:
  bool read_some();

  int pid_ = -1;
  int out_ = -1;
  int err_ = -1;
  std::string text_;
};

/// Runs it to its end.
[[nodiscard]] ProgramResult run_program(const std::vector<std::string>& arguments);

}  // namespace sidestream::cli
