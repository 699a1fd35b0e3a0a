#include "tools/cli/startup.h"

#include <cstdlib>
#include <exception>
#include <new>
#include <string_view>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tools/cli/train_command.h"

namespace sidestream::cli {
namespace {

// Of LibTorch 2.11 with CUDA the static objects take some 100 MiB.
constexpr rlim_t kStartBytes = rlim_t{256} << 20;

/// Takes no memory, which may be what is missing.
[[noreturn]] void end_with(std::string_view what) noexcept {
  for (const std::string_view part :
       {std::string_view("sidestream: "), what.substr(0, what.find('\n')), std::string_view("\n")}) {
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, part.data(), part.size());
  }
  _exit(kFailure);
}

[[noreturn]] void end_uncaught() noexcept {
  if (std::current_exception() != nullptr) {
    try {
      throw;
    } catch (const std::bad_alloc&) {
      end_with(kNoMemory);
    } catch (const std::exception& error) {
      end_with(error.what());
    } catch (...) {
      end_with("an error without a message");
    }
  }
  end_with("std::terminate was called without an error");
}

/// Addresses that the process holds; 0 where the system does not say.
rlim_t address_bytes() {
  char pages[32] = {};
  const int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  const ssize_t count = file < 0 ? 0 : read(file, pages, sizeof pages - 1);
  close(file);
  return count <= 0 ? 0 : std::strtoull(pages, nullptr, 10) * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
}

/// A file or socket that gets the number of a closed standard stream would be sent what the program prints.
void open_standard_streams() {
  int file = 0;
  while ((file = open("/dev/null", O_RDWR)) >= 0 && file <= STDERR_FILENO) {
  }
  close(file);
}

void start() {
  std::set_terminate(end_uncaught);
  open_standard_streams();
  rlimit addresses{};
  if (getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY &&
      addresses.rlim_cur < address_bytes() + kStartBytes) {
    end_with("the limit on virtual memory is too low for LibTorch to start; raise it (ulimit -v)");
  }
}
[[gnu::section(".preinit_array"), gnu::used]] void (*const before_static_objects)() = start;

}  // namespace
}  // namespace sidestream::cli
