#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <nlohmann/json.hpp>

#include "sidestream/device.h"
#include "sidestream/tensor_pool.h"
#include "tools/bench/bench_program.h"
#include "tools/bench/step_time.h"

namespace {

using namespace sidestream;

/// Nanoseconds of one `run`: the median of many blocks.
template <class Run>
double nanoseconds(const Run& run) {
  constexpr int kBlocks = 200;
  constexpr int kRuns = 500;
  std::vector<double> blocks;
  for (int block = 0; block < kBlocks; ++block) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kRuns; ++i) {
      run();
    }
    blocks.push_back(bench::seconds_since(begin) / kRuns * 1e9);
  }
  return bench::median(std::move(blocks));
}

/// Of TensorPool::allocate and free, as one. Each pair records an event, which is a call of the driver.
nlohmann::json pool_pairs(c10::Device device) {
  const c10::DeviceGuard on_device(device);
  const auto pair = [&](TensorPool::Memory memory) {
    TensorPool pool(memory, device);
    return nanoseconds([&] { pool.free(pool.allocate({64, 64}, c10::ScalarType::Float)); });
  };
  c10::Event event(device.type());
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return {{"host_pair_ns", pair(TensorPool::Memory::host)},
          {"device_pair_ns", pair(TensorPool::Memory::device)},
          {"event_record_ns", nanoseconds([&] { event.record(stream); })}};
}

// Bandwidth between pinned host memory and the device, by size of the copy, and what tensors of a pool cost.
int run(int argc, char** argv) {
  CLI::App app{"Measures the link between pinned host memory and a device, and pools of such memory."};
  std::string device = "auto";
  std::string report;
  std::vector<std::size_t> mebibytes{1, 16, 64, 256, 1024};
  app.add_option("--device", device, "auto, cuda, cuda:N or sim")->capture_default_str();
  app.add_option("--mib", mebibytes, "sizes of a copy, in MiB")->capture_default_str();
  app.add_option("--report", report, "JSON file");
  CLI11_PARSE(app, argc, argv);
  const auto found = find_device(device);
  nlohmann::json written{{"benchmark", "link"}, {"device", describe(found).name}, {"copies", nlohmann::json::array()}};
  std::printf("%s\n%10s %12s %12s %12s %14s\n", describe(found).name.c_str(), "MiB", "D2H GB/s", "H2D GB/s",
              "both GB/s", "pinning GB/s");
  for (const auto size : mebibytes) {
    const auto speed = measure_link(found, size << 20);
    std::printf("%10zu %12.1f %12.1f %12.1f %14.2f\n", size, speed.to_host, speed.to_device, speed.both, speed.pinning);
    written["copies"].push_back({{"mib", size},
                                 {"to_host", speed.to_host},
                                 {"to_device", speed.to_device},
                                 {"both", speed.both},
                                 {"pinning", speed.pinning}});
  }
  written["tensor_pool"] = pool_pairs(found);
  const auto pool = [&](const char* key) { return written["tensor_pool"][key].get<double>(); };
  std::printf(
      "A pool's allocate and free: %.0f ns in host memory, %.0f ns on the device. Each records an event (%.0f ns)\n",
      pool("host_pair_ns"), pool("device_pair_ns"), pool("event_record_ns"));
  bench::write_report(report, written);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::run_benchmark("bench_link", run, argc, argv); }
