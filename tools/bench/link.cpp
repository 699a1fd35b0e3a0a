#include <cstddef>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "sidestream/device.h"

namespace {

int run(int argc, char** argv) {
  CLI::App app{"Measures the link between pinned host memory and a device."};
  std::string device = "auto";
  std::vector<std::size_t> mebibytes{1, 16, 64, 256, 1024};
  app.add_option("--device", device, "auto, cuda, cuda:N or sim")->capture_default_str();
  app.add_option("--mib", mebibytes, "sizes of a copy, in MiB")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const auto found = sidestream::find_device(device);
  std::printf("%s\n%10s %12s %12s %12s %14s\n", sidestream::describe(found).name.c_str(), "MiB", "D2H GB/s", "H2D GB/s",
              "both GB/s", "pinning GB/s");
  for (const auto size : mebibytes) {
    const auto speed = sidestream::measure_link(found, size << 20);
    std::printf("%10zu %12.1f %12.1f %12.1f %14.2f\n", size, speed.to_host, speed.to_device, speed.both, speed.pinning);
  }
  return 0;
}

}  // namespace

// Bandwidth between pinned host memory and the device, by size of the copy.
int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_link: %s\n", error.what());
    return 1;
  }
}
