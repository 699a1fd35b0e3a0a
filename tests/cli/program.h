#pragma once
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

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
  enum class Start {
    file,  ///< the built file
    fork,  ///< a fork of this process, which has the program's code: LibTorch is loaded already
  };

  /// Starts it. The path is in the environment variable SIDESTREAM_PROGRAM. `before`, if any, is run by a shell that then becomes the
  /// program: "ulimit -v 3000000".
  explicit Program(const std::vector<std::string>& arguments, const std::string& before = {},
                   Start start = Start::file);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  /// Kills it if it still runs.
  ~Program();

  /// Reads stdout until `text` was seen; false when the program closed it before.
  bool wait_for(const std::string& text);
  /// The same of stderr.
  [[nodiscard]] bool wait_for_error(const std::string& text) const;
  void signal(int number) const;
  /// Waits until it has a handler for interrupts; false when it ended before.
  [[nodiscard]] bool wait_until_interrupts_are_caught() const;
  /// The processes that it started and that have not ended, in the order of their starts.
  [[nodiscard]] std::vector<int> children() const;
  /// Waits for its end.
  ProgramResult finish();

 private:
  bool read_some();
  /// Its line of /proc/PID/status that begins with `name`; empty when it ended.
  [[nodiscard]] std::string status(const std::string& name) const;

  int pid_ = -1;
  int out_ = -1;
  int err_ = -1;
  std::string text_;
};

/// AddressSanitizer needs addresses without end: no limit of them can be set.
#if defined(__has_feature)
inline constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif

/// Runs it to its end, if possible as a fork.
[[nodiscard]] ProgramResult run_program(const std::vector<std::string>& arguments, const std::string& before = {});

/// Arguments that train a small model on the simulated device, and `more`.
[[nodiscard]] std::vector<std::string> tiny_training(const std::vector<std::string>& more);

/// What a small training that ended well printed, and its report.
struct TrainedProgram {
  std::string out;
  nlohmann::json report;
};
/// Runs tiny_training(more) with a report. `before`: see Program.
[[nodiscard]] TrainedProgram trained(std::vector<std::string> more, const std::string& before = {});

/// The program ends with `code` and one line on stderr, its own, that holds `part`.
void expect_refusal(const std::vector<std::string>& arguments, int code, const std::string& part,
                    const std::string& before = {});

/// How often `text` holds `part`, not counting overlaps.
[[nodiscard]] std::size_t occurrences(const std::string& text, const std::string& part);

}  // namespace sidestream::cli
