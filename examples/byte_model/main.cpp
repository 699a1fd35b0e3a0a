// Trains a byte-level language model on a file: a transformer whose layers run as graphs. The activations of attention and
// feed-forward are offloaded. byte_model.h is the model; of Sidestream it uses only ss::call and the scopes.
//
//   byte_model FILE [auto|cuda|cuda:N|sim] [STEPS]
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <sidestream/sidestream.h>
#include <torch/optim/adamw.h>

#include "byte_model.h"

namespace ss = sidestream;

/// `batch` windows of `window` bytes from random places of the text: [batch, window], int64, on the CPU.
at::Tensor draw(const std::vector<unsigned char>& text, int64_t batch, int64_t window, std::mt19937& random) {
  at::Tensor windows = at::empty({batch, window}, at::kLong);
  int64_t* out = windows.mutable_data_ptr<int64_t>();
  std::uniform_int_distribution<std::size_t> first(0, text.size() - static_cast<std::size_t>(window));
  for (int64_t i = 0; i < batch; ++i) {
    out = std::copy_n(text.begin() + static_cast<std::ptrdiff_t>(first(random)), window, out);
  }
  return windows;
}

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::cerr << "usage: byte_model FILE [DEVICE] [STEPS]\n";
    return 2;
  }
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<unsigned char> text(std::istreambuf_iterator<char>(file), {});
  const c10::Device device = ss::find_device(argc > 2 ? argv[2] : "auto");
  const int steps = argc > 3 ? std::atoi(argv[3]) : 200;

  const byte_model::ModelShape shape;
  const int64_t batch = 6;
  if (text.size() < static_cast<std::size_t>(shape.seq) + 1) {
    std::cerr << argv[1] << ": cannot be read, or is shorter than " << shape.seq + 1 << " bytes\n";
    return 1;
  }
  at::manual_seed(1);
  std::mt19937 random(1);
  byte_model::ByteModel model(shape);
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));

  // The scopes of a block are named in byte_model.h; min_bytes because this model's tensors are far below the default of 1 MiB.
  ss::OffloadEngine engine(*model, ss::Options(device)
                                       .graph("blocks.*")
                                       .offload("blocks.*.qkv,blocks.*.core_attn,blocks.*.proj")
                                       .offload("blocks.*.norm2,blocks.*.fc1")
                                       .min_bytes(4096));
  for (int i = 0; i < steps; ++i) {
    const at::Tensor windows = draw(text, batch, shape.seq + 1, random).to(device);
    auto step = engine.step();
    const at::Tensor loss = model->loss(windows);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (i == 0 || (i + 1) % 20 == 0) {
      std::cout << "step " << i + 1 << "  loss " << loss.item<float>() << " nats a byte\n";
    }
  }
  engine.report().print(std::cout);
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';  // an ss::Error says what, where and the remedy
  return 1;
}
