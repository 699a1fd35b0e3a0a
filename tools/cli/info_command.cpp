#include "tools/cli/info_command.h"

#include <cstdio>

#include <fmt/format.h>
#include <torch/version.h>

#include "sidestream/device.h"
#include "sidestream/error.h"
#include "sidestream/version.h"

namespace sidestream::cli {
namespace {

void show(c10::Device device) {
  const DeviceSummary summary = describe(device);
  std::fputs(fmt::format("{}\n  name     {}\n  driver   {}\n  memory   {:.1f} GiB\n", device.is_cuda() ? "cuda" : "sim",
                         summary.name, summary.driver, static_cast<double>(summary.memory_bytes) / (1 << 30))
                 .c_str(),
             stdout);
  std::fflush(stdout);
  const LinkSpeed link = measure_link(device);
  std::fputs(fmt::format("  link     {:.1f} GB/s to the host, {:.1f} GB/s to the device, {:.1f} GB/s both at once "
                         "(measured, pinned memory)\n",
                         link.to_host, link.to_device, link.both)
                 .c_str(),
             stdout);
}

}  // namespace

int info() {
  std::fputs(fmt::format("sidestream {}\nLibTorch {}\n", version(), TORCH_VERSION).c_str(), stdout);
  show(find_device("sim"));
  try {
    show(find_device("cuda"));
  } catch (const Error& error) {
    std::fputs(fmt::format("cuda\n  not usable: {}\n", error.what()).c_str(), stdout);
  }
  return 0;
}

}  // namespace sidestream::cli
