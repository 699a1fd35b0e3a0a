// The code blocks of docs/recipes.md and docs/pipelines.md, and named ones of other pages. Each is in a function that runs it and checks
// what the page says of it.
// recipes_test.py puts the block in the place of its line "//@ NAME", and compiles the result.
//
//   recipes NAME        runs one recipe; without a name it lists them
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <sidestream/testing/simulator.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

//@ model

namespace {

constexpr int64_t kWidth = 64, kLength = 128;

void check(bool holds, const std::string& statement) {
  if (!holds) {
    throw std::runtime_error("this should hold: " + statement);
  }
}

struct Batch {
  at::Tensor data, target;
};

Batch batch_of(c10::Device device, int64_t length = kLength) {
  const at::Tensor x = at::randn({8, length, kWidth});
  return {x.to(device), x.cos().to(device)};
}

std::vector<Batch> batches(c10::Device device, int count) {
  std::vector<Batch> all;
  for (int i = 0; i < count; ++i) {
    all.push_back(batch_of(device));
  }
  return all;
}

void seed(c10::Device device, uint64_t value = 1) {
  torch::manual_seed(value);
  at::Generator generator = at::globalContext().defaultGenerator(device);
  generator.set_current_seed(value);
}

Model model_of(c10::Device device, int64_t layers = 4) {
  seed(device);
  Model model(layers, kWidth);
  model->to(device);
  return model;
}

std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.detach().to(at::kCPU).clone());
  }
  return copies;
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool same = a.size() == b.size() && !a.empty();
  for (std::size_t i = 0; same && i < a.size(); ++i) {
    same = at::equal(a[i], b[i]);
  }
  return same;
}

void first_step_out_of_memory(c10::Device device) {
  Model model = model_of(device, 12);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<Batch> loader = batches(device, 4);
  ss::reset_memory_peaks(device);
  model->loss(loader[0].data, loader[0].target).backward();
  optimizer.zero_grad();
  ss::release_cached_memory(device);
  ss::set_memory_limit(device, static_cast<std::size_t>(ss::memory_use(device).reserved_peak) * 3 / 4);
  bool fits = true;
  try {
    model->loss(loader[0].data, loader[0].target).backward();
  } catch (const std::exception&) {
    fits = false;
  }
  check(!fits, "plain training runs out of memory");
  optimizer.zero_grad();
  //@ first step out of memory
  check(report.first_step_peak_bytes < report.sizing_peak_bytes, "the first step already takes less");
  check(report.steps == 4 && report.step_peak_bytes < report.sizing_peak_bytes, "all steps fit");
}

void layers_4_to_20(c10::Device device) {
  Model model = model_of(device, 24);
  std::vector<Batch> loader = batches(device, 2);
  //@ layers 4 to 20
  std::size_t offloaded = 0;
  for (const ss::GroupReport& group : engine.report().groups) {
    bool named = false;
    for (int layer = 4; layer <= 20; ++layer) {
      named = named || group.name == "blocks." + std::to_string(layer) + ".mlp";
    }
    check(named || group.offloaded_bytes == 0, group.name + " is not named and stays");
    offloaded += group.offloaded_bytes > 0 ? 1 : 0;
  }
  check(offloaded >= 12, "most of the groups that are named are offloaded");
}

void recompute_some_layers(c10::Device device) {
  const std::size_t recomputed_blocks = 2;
  std::vector<std::vector<at::Tensor>> gradients;
  const std::vector<Batch> loader(3, batch_of(device, 4 * kLength));  // a block's input has 1 MiB: smaller tensors stay
  for (const bool plain : {true, false}) {
    Model model = model_of(device, 8);
    seed(device, 2);
    if (plain) {
      for (const Batch& batch : loader) {
        model->loss(batch.data, batch.target).backward();
      }
    } else {
      //@ recompute some layers
      std::map<std::string, int64_t> offloaded;
      for (const ss::GroupReport& group : engine.report().groups) {
        offloaded[group.name] += group.offloaded_bytes;
      }
      check(offloaded["recomputed"] > 0, "the inputs of recomputed blocks are offloaded");
      check(offloaded["blocks.2.mlp"] > 0, "groups of the other blocks are offloaded");
    }
    gradients.emplace_back();
    for (const at::Tensor& parameter : model->parameters()) {
      gradients.back().push_back(parameter.grad());
    }
    gradients.back() = values_of(gradients.back());
  }
  check(equal(gradients[0], gradients[1]), "gradients are plain training's bit for bit");
}

void validation_outside_of_a_step(c10::Device device) {
  Model model = model_of(device);
  std::vector<Batch> loader = batches(device, 3), held_out = batches(device, 2);
  ss::OffloadEngine engine(*model, ss::Options(device).graph("blocks.*").offload("blocks.*.mlp"));
  at::Tensor total = at::zeros({}, device);
  for (auto& batch : loader) {
    {
      auto step = engine.step();
      model->loss(batch.data, batch.target).backward();
    }
    //@ validation outside of a step
  }
  check(engine.report().eager_calls == 4, "no call but those of the first step ran eagerly in a step");
  check(model->is_training() && !total.requires_grad() && total.item<float>() > 0, "the validation pass has a loss");
}

void validation_inside_of_a_step(c10::Device device) {
  Model model = model_of(device);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<Batch> loader = batches(device, 4), held_out = batches(device, 2);
  at::Tensor total = at::zeros({}, device);
  //@ validation inside of a step
  check(engine.report().captures == 4 * 3, "each block has graphs of its forward, its backward and its validation");
  check(engine.report().replays == 4 * 2 + 2 * 4, "training and validation replay");
}

void four_microbatches(c10::Device device) {
  const int steps = 4;
  const auto next_batch = [&] { return batch_of(device); };
  std::vector<at::Tensor> ours;
  {
    Model model = model_of(device);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    //@ four microbatches
    check(engine.report().captures == 4 * 2, "one capture of each block serves all microbatches");
    ours = values_of(model->parameters());
  }
  Model model = model_of(device);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int i = 0; i < steps; ++i) {
    for (int m = 0; m < 4; ++m) {
      auto batch = next_batch();
      (model->loss(batch.data, batch.target) / 4).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  check(equal(ours, values_of(model->parameters())), "the weights are plain training's bit for bit");
}

void bf16_autocast(c10::Device device) {
  Model model = model_of(device);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<Batch> loader = batches(device, 3);
  //@ bf16 autocast
  check(!at::autocast::is_autocast_enabled(device.type()), "the region has ended");
  check(engine.report().replays == 8, "the steps replay");
}

void clipping(c10::Device device) {
  std::vector<at::Tensor> ours, norms;
  {
    Model model = model_of(device);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    ss::OffloadEngine engine(*model, ss::Options(device).graph("blocks.*"));
    for (int i = 0; i < 3; ++i) {
      auto batch = batch_of(device);
      //@ clipping
      norms.push_back(norm);
    }
    ours = values_of(model->parameters());
  }
  Model model = model_of(device);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int i = 0; i < 3; ++i) {
    auto batch = batch_of(device);
    model->loss(batch.data, batch.target).backward();
    const double norm = torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    check(norm == norms[static_cast<std::size_t>(i)].item<float>(), "both give the same norm");
    optimizer.step();
    optimizer.zero_grad();
  }
  check(equal(ours, values_of(model->parameters())), "both clip to the same gradients");
}

void adamw_with_call(c10::Device device) {
  Model model = model_of(device);
  std::vector<Batch> loader = batches(device, 3);
  //@ AdamW with ss::call
  check(engine.report().replays == 8, "the steps replay");
}

void adamw_in_a_graphed_step(c10::Device device) {
  const int steps = 3;
  Model model = model_of(device);
  const std::vector<at::Tensor> before = values_of(model->parameters());
  const auto next_batch = [&] { return batch_of(device); };
  //@ AdamW in a graphed step
  check(train.captures() == 1 && train.offloaded_bytes() > 0, "one graph, with its copies");
  check(!equal(before, values_of(model->parameters())), "it trains");
}

//@ save

//@ resume

/// Losses, gradients and weights of so many steps.
std::vector<at::Tensor> train(Model& model, torch::optim::AdamW& optimizer, ss::OffloadEngine& engine,
                              c10::Device device, int steps) {
  std::vector<at::Tensor> seen;
  for (int i = 0; i < steps; ++i) {
    auto batch = batch_of(device);
    auto step = engine.step();
    at::Tensor loss = model->loss(batch.data, batch.target);
    loss.backward();
    seen.push_back(loss);
    for (const at::Tensor& parameter : model->parameters()) {
      seen.push_back(parameter.grad().clone());
    }
    optimizer.step();
    optimizer.zero_grad();
    for (const at::Tensor& parameter : model->parameters()) {
      seen.push_back(parameter.detach().clone());
    }
  }
  return values_of(seen);
}

void save_and_resume(c10::Device device) {
  const auto options = ss::Options(device).graph("blocks.*").offload("blocks.*.mlp");
  std::vector<at::Tensor> unbroken;
  {
    Model model = model_of(device);
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
    ss::OffloadEngine engine(*model, options);
    train(model, optimizer, engine, device, 2);
    save(".", model, optimizer, device);
    unbroken = train(model, optimizer, engine, device, 2);
  }
  seed(device, 7);
  Model model(4, kWidth);
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  resume(".", model, optimizer, device);
  ss::OffloadEngine engine(*model, options);
  check(equal(train(model, optimizer, engine, device, 2), unbroken),
        "losses, gradients and weights after resume are those of the unbroken run, bit for bit");
}

void variable_sequence_lengths(c10::Device device) {
  Model model = model_of(device);
  std::vector<Batch> loader;
  for (const int64_t length : {160, 128, 100, 180, 60, 120, 64, 190}) {
    loader.push_back(batch_of(device, length));
  }
  //@ variable sequence lengths
  check(engine.report().captures == 3 * 4 * 2, "three padded lengths, each captured once");
}

void how_much_would_be_saved(c10::Device device) {
  Model model = model_of(device);
  const auto next_batch = [&] { return batch_of(device); };
  //@ how much would be saved
  check(report.step_peak_bytes < report.sizing_peak_bytes && report.offloaded_bytes > 0 && hidden > 0,
        "the figures are there");
  check(report.saved_bytes >= report.offloaded_bytes, "no more is offloaded than was saved");
}

/// The first step asks nobody, so that no process group is needed here.
void several_ranks(c10::Device device) {
  Model model = model_of(device);
  const c10::intrusive_ptr<c10d::ProcessGroup> group;
  //@ several ranks
  auto batch = batch_of(device);
  auto step = engine.step();
  model->loss(batch.data, batch.target).backward();
  step.finish();
}

void where_the_host_waits(c10::Device device) {
  Model model = model_of(device);
  std::vector<Batch> loader = batches(device, 4);
  //@ where the host waits
  check(engine.report().syncs_found == 0, "this model makes no host wait");
}

void pinned_buffers(c10::Device device) {
  std::vector<Batch> loader = batches(device, 4);
  std::vector<at::Tensor> expected, data;
  for (const Batch& batch : loader) {
    expected.push_back(batch.data.cpu());
  }
  //@ pinned buffers
  for (const Batch& batch : loader) {
    data.push_back(batch.data);
  }
  check(equal(values_of(data), expected), "the batches come back bit for bit");
  check(status.total == 2 && status.in_use == 0, "two tensors are pinned, and both are free");
  check(pool.statistics().allocations_after_seal == 0, "nothing is pinned after the seal");
}

/// One rank with two virtual stages, so that both ends of each send are here.
void pipeline_order(c10::Device device) {
  const int steps = 3;
  const int64_t ranks = 1, stages = 2, microbatches = 4, rank = 0;
  const auto model_without_draws = [&] {  // the order of random numbers would be another in plain training
    Model model = model_of(device, 12);   // so many that the copies of a part's first blocks have time
    for (const auto& block : *model->blocks) {
      block->as<Block>()->dropout->options.p(0);
    }
    return model;
  };
  const std::vector<Batch> data = batches(device, static_cast<int>(microbatches));
  std::vector<at::Tensor> ours;
  {
    Model model = model_without_draws();
    torch::optim::SGD optimizer(model->parameters(), 0.001);
    std::map<std::pair<int64_t, int64_t>, at::Tensor> activations, gradients;  // by stage and microbatch
    const auto run = [&](std::size_t first, at::Tensor x) {
      for (std::size_t i = first; i < first + 6; ++i) {
        x = ss::call(model->blocks[i]->as<Block>(), x);
      }
      return x;
    };
    const std::vector<std::function<at::Tensor(at::Tensor, int64_t)>> parts{
        [&](const at::Tensor& x, int64_t) { return run(0, x); },
        [&](const at::Tensor& x, int64_t microbatch) {
          return (run(6, x) - data[static_cast<std::size_t>(microbatch)].target).square().mean() / microbatches;
        }};
    const auto receive = [&](const ss::PipelineStep& work) {
      if (work.kind == ss::PipelineStep::Kind::backward) {
        return work.stage == 1 ? at::Tensor() : gradients.at({0, work.microbatch});
      }
      return work.stage == 0 ? data[static_cast<std::size_t>(work.microbatch)].data
                             : activations.at({1, work.microbatch});
    };
    const auto send = [&](const ss::PipelineStep& work, const at::Tensor& tensor) {
      if (work.kind == ss::PipelineStep::Kind::backward) {
        gradients[{work.stage - 1, work.microbatch}] = tensor;
      } else {
        activations[{work.stage + 1, work.microbatch}] = tensor;
      }
    };
    //@ pipeline order
    check(engine.report().replays > 0 && engine.report().offloaded_bytes > 0, "chunks replay, and are offloaded");
    ours = values_of(model->parameters());
  }
  Model model = model_without_draws();
  torch::optim::SGD optimizer(model->parameters(), 0.001);
  for (int i = 0; i < steps; ++i) {
    for (const Batch& batch : data) {
      (model->loss(batch.data, batch.target) / microbatches).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  check(equal(ours, values_of(model->parameters())), "the weights are plain training's bit for bit");
}

void callables_in_order(c10::Device device) {
  const int64_t ranks = 2, stages = 2, microbatches = 4, rank = 0;
  seed(device);
  torch::nn::Sequential model;
  std::vector<torch::nn::AnyModule> layers;
  for (int i = 0; i < 4; ++i) {
    torch::nn::Linear linear(kWidth, kWidth);
    layers.emplace_back(linear);
    model->push_back(linear);
  }
  model->to(device);
  const at::Tensor sample = batch_of(device, 4 * kLength).data.requires_grad_();
  ss::OffloadEngine engine(*model, ss::Options(device).offload("layers.*"));
  //@ callables in order
  std::vector<at::Tensor> ours;
  for (const bool plainly : {false, true}) {
    model->zero_grad();
    std::map<std::pair<int64_t, int64_t>, at::Tensor> outputs;
    std::optional<ss::Step> step;
    if (!plainly) {
      step.emplace(engine.step(order));
    }
    for (const ss::PipelineStep& work : order) {
      at::Tensor& output = outputs[{work.stage, work.microbatch}];
      if (work.kind == ss::PipelineStep::Kind::backward) {
        output.square().mean().backward();
        continue;
      }
      std::optional<ss::Chunk> chunk;
      if (!plainly) {
        chunk.emplace(engine.chunk({work.stage, work.microbatch}));
      }
      output = (sample.detach() * (1 + work.microbatch)).requires_grad_();
      for (auto i = static_cast<std::size_t>(2 * work.stage), end = i + 2; i < end; ++i) {
        output = plainly ? layers[i].forward(output) : graphed[i]({output})[0];
      }
    }
    if (step) {
      step->finish();
      check(engine.report().replays == 2 * 4 * microbatches, "callables replay for all microbatches");
    }
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : model->parameters()) {
      gradients.push_back(parameter.grad());
    }
    const std::vector<at::Tensor> now = values_of(gradients);
    check(!plainly || equal(ours, now), "the gradients are plain training's bit for bit");
    ours = now;
  }
}

void groups_by_hand(c10::Device device) {
  const int steps = 3;
  const int64_t microbatches = 4;
  std::vector<at::Tensor> ours;
  for (const bool plainly : {false, true}) {
    seed(device);
    torch::nn::Sequential model;
    std::vector<std::function<at::Tensor(const at::Tensor&)>> layers;
    for (int i = 0; i < 4; ++i) {
      torch::nn::Linear linear(kWidth, kWidth);
      model->push_back(linear);
      layers.emplace_back([linear](const at::Tensor& x) mutable { return linear->forward(x).exp().mul(0.1).tanh(); });
    }
    model->to(device);
    torch::optim::SGD optimizer(model->parameters(), 0.001);
    std::vector<Batch> data;
    for (int64_t m = 0; m < microbatches; ++m) {
      data.push_back(batch_of(device, 4 * kLength));  // so that a storage has 1 MiB
    }
    std::size_t taken = 0;
    const auto next_batch = [&] {
      const Batch& batch = data[taken++ % data.size()];
      return std::make_pair(batch.data, batch.target);
    };
    if (!plainly) {
      //@ groups by hand
      check(engine.report().offloaded_bytes > 0, "groups are offloaded");
      ours = values_of(model->parameters());
      continue;
    }
    for (int i = 0; i < steps; ++i) {
      for (int64_t m = 0; m < microbatches; ++m) {
        auto [h, target] = next_batch();
        for (const auto& layer : layers) {
          h = layer(h);
        }
        (h - target).square().mean().backward();
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    check(equal(ours, values_of(model->parameters())), "the weights are plain training's bit for bit");
  }
}

std::size_t offloaded_groups(const ss::OffloadEngine& engine) {
  const std::vector<ss::GroupReport> groups = engine.report().groups;
  return static_cast<std::size_t>(std::count_if(
      groups.begin(), groups.end(), [](const ss::GroupReport& group) { return group.offloaded_bytes > 0; }));
}

void a_budget(c10::Device device) {
  Model model = model_of(device);
  //@ a budget
  for (Batch& batch : batches(device, 6)) {
    auto step = engine.step();
    model->loss(batch.data, batch.target).backward();
  }
  const ss::Report report = engine.report();
  check(report.forecast_peak_bytes > 0, "the engine says what a step will take");
  check(report.offloaded_bytes == 0, "a budget that is large enough needs no offload");
}

void budgets_by_name(c10::Device device) {
  Model model = model_of(device);
  ss::Options options(device);
  //@ budgets by name
  ss::OffloadEngine engine(*model, options.min_bytes(1024).lag(1));
  for (Batch& batch : batches(device, 2)) {
    auto step = engine.step();
    model->loss(batch.data, batch.target).backward();
  }
  std::int64_t attention = 0;
  std::int64_t offloaded = 0;
  for (const ss::GroupReport& group : engine.report().groups) {
    if (group.name.find(".attention") != std::string::npos) {
      attention += group.bytes;
      offloaded += group.offloaded_bytes;
    }
  }
  check(offloaded > 0 && offloaded <= attention / 2, "at most half of the attention's bytes are offloaded");
}

void a_switch_of_offload(c10::Device device) {
  Model model = model_of(device);
  ss::OffloadEngine engine(*model, ss::Options(device).offload("all").min_bytes(1024).lag(1));
  {
    auto step = engine.step();
    const Batch batch = batch_of(device);
    model->loss(batch.data, batch.target).backward();
    const ss::OffloadScope blocks("blocks"), block("0"), scope("core_attn");  // the page's model has such scopes
  }
  //@ a switch of offload
  for (Batch& batch : batches(device, 2)) {
    auto step = engine.step();
    model->loss(batch.data, batch.target).backward();
  }
  check(offloaded_groups(engine) > 0, "groups are offloaded again");
}

const std::map<std::string, std::function<void(c10::Device)>> kRecipes{
    {"first step out of memory", first_step_out_of_memory},
    {"layers 4 to 20", layers_4_to_20},
    {"recompute some layers", recompute_some_layers},
    {"validation outside of a step", validation_outside_of_a_step},
    {"validation inside of a step", validation_inside_of_a_step},
    {"four microbatches", four_microbatches},
    {"bf16 autocast", bf16_autocast},
    {"clipping", clipping},
    {"AdamW with ss::call", adamw_with_call},
    {"AdamW in a graphed step", adamw_in_a_graphed_step},
    {"save and resume", save_and_resume},
    {"variable sequence lengths", variable_sequence_lengths},
    {"how much would be saved", how_much_would_be_saved},
    {"several ranks", several_ranks},
    {"where the host waits", where_the_host_waits},
    {"pinned buffers", pinned_buffers},
    {"pipeline order", pipeline_order},
    {"callables in order", callables_in_order},
    {"groups by hand", groups_by_hand},
    {"a budget", a_budget},
    {"budgets by name", budgets_by_name},
    {"a switch of offload", a_switch_of_offload},
};

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2) {
    for (const auto& [name, run] : kRecipes) {
      std::cout << name << '\n';
    }
    return 0;
  }
  kRecipes.at(argv[1])(ss::find_device("sim"));
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
