// A trainer that links libsidestream alone. Each mode is one process, as what a process loads and registers is for its life.
#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "sidestream/sidestream.h"

namespace ss = sidestream;

namespace {

struct Model : torch::nn::Module {
  Model() : first(8, 8), second(8, 8) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return ss::call(second, at::gelu(ss::call(first, x))); }
  torch::nn::Linear first;
  torch::nn::Linear second;
};

/// Gradients after three steps with new data each, on the CPU; `graphed`: by an engine.
std::vector<at::Tensor> train(c10::Device device, bool graphed) {
  torch::manual_seed(1);
  Model model;
  model.to(device);
  std::unique_ptr<ss::OffloadEngine> engine;
  if (graphed) {
    engine = std::make_unique<ss::OffloadEngine>(
        model, ss::Options(device).graph("first,second").offload("first").min_bytes(1));
  }
  std::vector<at::Tensor> gradients;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor data = at::randn({4, 8}).to(device);
    model.zero_grad();
    const auto pass = [&] { model.forward(data).square().sum().backward(); };
    if (engine != nullptr) {
      const auto active = engine->step();
      pass();
    } else {
      pass();
    }
    for (const at::Tensor& parameter : model.parameters()) {
      gradients.push_back(parameter.grad().to(at::kCPU).clone());
    }
  }
  return gradients;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool equal = a.size() == b.size() && !a.empty();
  for (std::size_t i = 0; equal && i < a.size(); ++i) {
    equal = at::equal(a[i], b[i]);
  }
  return equal;
}

bool simulator_is_loaded() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    if (line.find("libsidestream_sim") != std::string::npos) {
      return true;
    }
  }
  return false;
}

bool simulator_is_registered() {
  return c10::impl::hasDeviceGuardImpl(c10::DeviceType::PrivateUse1) || c10::is_privateuse1_backend_registered();
}

int fail(const std::string& what) {
  std::cerr << what << '\n';
  return 1;
}

/// LibTorch's own engine has run a backward, and started its device threads, before anybody asks for the simulator.
int after_a_backward() {
  const at::Tensor x = at::ones({2}).requires_grad_(true);
  x.square().sum().backward();
  const std::vector<at::Tensor> plain = train(at::kCPU, false);
  const c10::Device sim = ss::find_device("sim");
  if (!same(plain, train(sim, false))) {
    return fail("plain training on sim gives other gradients than on the CPU");
  }
  return same(plain, train(sim, true)) ? 0 : fail("graphed training on sim gives other gradients than on the CPU");
}

/// Another thread's backward runs on the device's autograd threads too.
int from_several_threads() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] { (void)ss::find_device("sim"); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return same(train(at::kCPU, false), train(ss::find_device("sim"), true)) ? 0
                                                                           : fail("other gradients than on the CPU");
}

/// Who asks for a GPU carries nothing of the simulator, whether there is a GPU or not.
int carries_no_simulator() {
  c10::Allocator* const before = c10::GetCPUAllocator();
  try {
    const c10::Device gpu = ss::find_device("cuda");
    if (train(gpu, true).empty()) {
      return fail("no gradients");
    }
    std::cout << "trained on " << gpu << '\n';
  } catch (const ss::Error& error) {
    std::cout << error.what() << '\n';
  }
  if (simulator_is_registered()) {
    return fail("a PrivateUse1 device is registered");
  }
  if (c10::GetCPUAllocator() != before) {
    return fail("the CPU's allocator was replaced");
  }
  return simulator_is_loaded() ? fail("libsidestream_sim is loaded") : 0;
}

class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

/// Prints the device, and each warning on a line of its own.
int automatic() {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  try {
    const c10::Device device = ss::find_device("auto");
    std::cout << "device " << device << '\n';
  } catch (const ss::Error& error) {
    std::cout << "error " << error.what() << '\n';
  }
  for (const std::string& message : warnings.messages) {
    std::cout << "warning " << message << '\n';
  }
  return 0;
}

int simulated() {
  try {
    const c10::Device device = ss::find_device("sim:0");
    std::cout << "device " << device << '\n';
  } catch (const ss::Error& error) {
    std::cout << "error " << error.what() << '\n';
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<int()>> modes{{"after_a_backward", after_a_backward},
                                                          {"from_several_threads", from_several_threads},
                                                          {"carries_no_simulator", carries_no_simulator},
                                                          {"automatic", automatic},
                                                          {"simulated", simulated}};
  const auto mode = modes.find(argc == 2 ? argv[1] : "");
  return mode == modes.end() ? fail("usage: trainer MODE") : mode->second();
}
