#include "graphs/engine/engine_state.h"

#include <algorithm>
#include <exception>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "graphs/engine/checked_options.h"
#include "offload/pinned_plan.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

thread_local EngineState* t_active = nullptr;

NamePatterns patterns_of(const std::vector<std::string>& lists) {
  std::vector<std::string> all;
  for (const std::string& list : lists) {
    const NamePatterns parsed = NamePatterns::parse(list);
    all.insert(all.end(), parsed.patterns().begin(), parsed.patterns().end());
  }
  return NamePatterns(std::move(all));
}

}  // namespace

EngineState::EngineState(torch::nn::Module& model, Options options, std::shared_ptr<Runtime> runtime)
    : model_(model),
      options_(checked_options(std::move(options))),
      graphed_(patterns_of(options_.graph_patterns())),
      checked_(options_.check_steps() > 0
                   ? std::make_shared<CheckedRuntime>(runtime != nullptr ? runtime : make_runtime(options_.device()))
                   : nullptr),
      runtime_(checked_ != nullptr  ? checked_
               : runtime != nullptr ? std::move(runtime)
                                    : make_runtime(options_.device())),
      arena_(std::make_shared<HostArena>(*runtime_, options_.host_cap())),
      tree_(patterns_of(options_.offload_patterns())),
      exclusions_(runtime_->device(), options_.min_bytes()),
      capture_stream_(runtime_->create_stream()),
      capture_offload_(std::make_shared<CaptureOffload>(runtime_, arena_, capture_stream_)),
      eager_(std::make_shared<EagerOffload>(runtime_, arena_, static_cast<std::size_t>(options_.groups_in_flight()))) {
  install_autograd_engine();
  learn_names();
  std::vector<at::Tensor> tensors = model.parameters();
  const std::vector<at::Tensor> buffers = model.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  exclusions_.set_parameters(std::move(tensors));
}

EngineState::~EngineState() = default;

EngineState* EngineState::active() noexcept { return t_active; }

GraphResources EngineState::graph_resources() {
  return {runtime_, arena_, &tree_, &exclusions_, &capture_stream_, capture_offload_};
}

std::unique_ptr<Recorder> EngineState::make_recorder(std::shared_ptr<StorageMover> mover, const PlannedPass* planned) {
  return std::make_unique<Recorder>(tree_, exclusions_, std::move(mover), planned);
}

void EngineState::learn_names() {
  names_.clear();
  for (const auto& item : model_.named_modules("", /*include_self=*/false)) {
    names_.emplace(item.value().get(), std::make_pair(item.key(), item.value()));
  }
  names_.emplace(&model_, std::make_pair("model", std::shared_ptr<const torch::nn::Module>(
                                                      std::shared_ptr<const torch::nn::Module>(), &model_)));
}

void EngineState::begin_step() {
  if (in_step_) {
    throw UsageError("a step of this engine is active already; end it before the next begins");
  }
  exclusions_.refresh_parameters();
  if (checked_ != nullptr) {
    if (step_.steps < options_.check_steps()) {
      checked_->begin_step(static_cast<std::uint64_t>(step_.steps + 1));
    } else {
      checked_->stop();
    }
  }
  if (sized_) {
    check_patterns();
    follow_relocated_weights();
    capture_recorded();
    if (!eager_planned_) {
      plan_eager();
    }
    eager_->begin_step();
    recorder_ = make_recorder(eager_, &planned_);
  } else {
    exclusions_.reset_tallies();
    sizing_ = std::make_shared<SizingMover>([this] {
      const std::int64_t grown = runtime_->memory_stats().allocated - allocated_at_begin_;
      const auto known = static_cast<std::int64_t>(recorder_->saved_bytes() + recorded_.kept_bytes());
      step_.unseen_bytes = std::max<std::int64_t>(0, grown - known);
    });
    recorder_ = make_recorder(sizing_, nullptr);
  }
  allocated_at_begin_ = runtime_->memory_stats().allocated;
  runtime_->reset_peak_memory_stats();
  recording_.emplace(recorder_.get());
  journal_operators(journaling_);
  before_ = std::exchange(t_active, this);
  in_step_ = true;
}

void EngineState::end_step(bool failed) {
  in_step_ = false;
  t_active = before_;
  recording_.reset();
  journaling_.reset();
  inside_graphed_call_ = false;
  // What fails here must not keep the rest from being let go.
  std::exception_ptr error;
  const auto attempt = [&](const auto& part) {
    try {
      part();
    } catch (...) {
      failed = true;
      error = error == nullptr ? std::current_exception() : error;
    }
  };
  if (!failed) {
    attempt([&] { recorder_->finish(); });
  }
  attempt([&] { eager_->end_step(); });
  std::uint64_t offloaded = 0;
  std::uint64_t reloaded = 0;
  step_.waits = step_.inline_reloads = step_.replays = 0;
  for (const auto& weak : chains_) {
    if (const auto holder = weak.lock(); holder != nullptr && holder->chain != nullptr) {
      attempt([&] { holder->chain->join_copies(); });
      const Chain::Counts counts = holder->chain->take_counts();
      step_.replays += static_cast<std::int64_t>(counts.replays);
      step_.waits += static_cast<std::int64_t>(counts.waits);
      step_.inline_reloads += static_cast<std::int64_t>(counts.inline_reloads);
      offloaded += counts.offloaded_bytes;
      reloaded += counts.reloaded_bytes;
    }
  }
  if (sizing_ != nullptr) {
    sizing_->pass_ended();
  }
  if (failed) {
    recorded_.clear();
    recorder_.reset();
    if (error != nullptr) {
      std::rethrow_exception(error);
    }
    return;
  }
  const std::int64_t peak = runtime_->memory_stats().allocated_peak;
  if (sized_) {
    const EagerOffload::Counts counts = eager_->counts();
    step_.offloaded_bytes = static_cast<std::int64_t>(offloaded + counts.offloaded_bytes);
    step_.reloaded_bytes = static_cast<std::int64_t>(reloaded + counts.reloaded_bytes);
    step_.waits += static_cast<std::int64_t>(counts.waits);
    step_.inline_reloads += static_cast<std::int64_t>(counts.inline_reloads);
    step_.copied_twice_bytes = static_cast<std::int64_t>(recorder_->counts().copied_twice_bytes);
    step_.step_peak_bytes = peak;
  } else {
    step_.sizing_peak_bytes = peak;
    finish_sizing();
  }
  ++step_.steps;
  recorder_.reset();
}

void EngineState::finish_sizing() {
  eager_profile_ = recorder_->profile();
  eager_scopes_ = recorder_->group_scopes();
  step_.saved_bytes = static_cast<std::int64_t>(recorder_->saved_bytes());
  for (const std::uint32_t group : sizing_->needed_immediately()) {
    eager_profile_.groups[group].needed_immediately = true;
  }
  // What a graphed call saves is its chain's business; an eager group that shares a storage with it is held back by it.
  for (GroupProfile& group : eager_profile_.groups) {
    if (in_graphed_call(group.name)) {
      group.selected = group.needed_immediately = false;
    }
  }
  sizing_.reset();
  sized_ = true;
}

bool EngineState::in_graphed_call(const std::string& group) const {
  return std::any_of(sites_.begin(), sites_.end(), [&](const CallSite& site) {
    const std::string& name = site.scope->name;
    return site.graphed && group.compare(0, name.size(), name) == 0 &&
           (group.size() == name.size() || group[name.size()] == '.');
  });
}

void EngineState::check_patterns() const {
  std::vector<std::string> called;
  for (const CallSite& site : sites_) {
    called.push_back(site.scope->name);
  }
  if (!graphed_.empty() && !graphed_.matches("")) {
    graphed_.require_each_matches(called);
  }
  if (!tree_.selected().empty() && !tree_.selected().matches("")) {
    tree_.selected().require_each_matches(tree_.names());
  }
}

void EngineState::plan_eager() {
  eager_plan_ = plan_and_pin(eager_profile_, *arena_);
  planned_ = lay_out(eager_profile_, eager_scopes_, eager_plan_.decisions.data());
  eager_planned_ = true;
}

void EngineState::journal_operators(std::optional<OperatorObserverGuard>& guard) {
  if (checked_ != nullptr && step_.steps < options_.check_steps()) {
    guard.emplace([checked = checked_](const OperatorAccess& access) {
      if (const auto node = torch::autograd::get_current_node(); node != nullptr) {
        checked->observe(access, "backward", node->name());
      } else if (const Recorder* recorder = current_recorder(); recorder != nullptr && recorder->depth() > 1) {
        checked->observe(access, "forward", recorder->scope().name);
      } else {
        checked->observe(access);
      }
    });
  }
}

void EngineState::register_chain(const std::shared_ptr<ChainHolder>& holder) {
  chains_.push_back(holder);
  mark_static_outputs();
}

void EngineState::mark_static_outputs() {
  exclusions_.remove_static_inputs();
  for (const auto& weak : chains_) {
    if (const auto holder = weak.lock(); holder != nullptr && holder->chain != nullptr) {
      for (const Layer& layer : holder->chain->layers()) {
        for (const at::Tensor& output : layer.outputs) {
          if (output.defined()) {
            exclusions_.add_static_input(output);
          }
        }
      }
    }
  }
}

std::shared_ptr<Chain> EngineState::capture_chain(std::vector<LayerSpec> specs, const GraphOptions& options) {
  struct Restore {
    EngineState& state;
    bool capturing;
    EngineState* active;
    ~Restore() {
      state.capturing_ = capturing;
      t_active = active;
    }
  } const restore{*this, std::exchange(capturing_, true), std::exchange(t_active, this)};
  std::optional<OperatorObserverGuard> journaling;
  journal_operators(journaling);
  std::shared_ptr<Chain> chain;
  try {
    chain = Chain::capture(graph_resources(), std::move(specs), options);
  } catch (...) {
    mark_static_outputs();  // a capture ends with none marked
    throw;
  }
  for (const Layer& layer : chain->layers()) {
    step_.captures += layer.has_backward ? 2 : 1;
  }
  eager_planned_ = false;
  return chain;
}

void EngineState::capture_recorded() {
  if (recorded_.empty()) {
    return;
  }
  std::size_t slots = 0;
  for (const auto& call : recorded_.calls()) {
    slots = std::max(slots, call->slot + 1);
  }
  for (std::size_t slot = 0; slot < slots; ++slot) {
    std::vector<LayerSpec> specs;
    std::vector<RecordedCall*> calls;
    std::vector<std::int64_t> place(recorded_.calls().size(), -1);
    for (std::size_t i = 0; i < recorded_.calls().size(); ++i) {
      RecordedCall& call = *recorded_.calls()[i];
      if (call.slot != slot || call.captured) {
        continue;
      }
      LayerSpec spec{call.site->scope->name, call.site->scope, call.body, call.site->module, call.inputs};
      for (LayerInput& input : spec.inputs) {
        input.from_layer = input.from_layer < 0 ? -1 : place[input.from_layer];
      }
      place[i] = static_cast<std::int64_t>(specs.size());
      specs.push_back(std::move(spec));
      calls.push_back(&call);
    }
    if (specs.empty()) {
      continue;
    }
    auto holder = std::make_shared<ChainHolder>();
    holder->chain = capture_chain(std::move(specs), options_.graph_options());
    for (std::size_t layer = 0; layer < calls.size(); ++layer) {
      calls[layer]->captured = true;
      calls[layer]->site->variants.push_back(
          {holder, layer, calls[layer]->guards, calls[layer]->shape, calls[layer]->autocast});
      step_.recaptures += calls[layer]->site->variants.size() > 1 ? 1 : 0;
    }
    own_chains_.push_back(holder);
    register_chain(holder);
  }
  recorded_.clear();
  runtime_->release_cached_memory();
}

void EngineState::recapture(ChainHolder& holder) {
  std::vector<LayerSpec> specs;
  for (const Layer& layer : holder.chain->layers()) {
    LayerSpec spec = layer.spec;
    for (std::size_t i = 0; i < spec.inputs.size(); ++i) {
      const StaticInput& held = layer.inputs[i];
      if (spec.inputs[i].from_layer < 0 && held.tensor.defined()) {
        spec.inputs[i].sample = held.tensor.detach().requires_grad_(held.requires_grad);
      }
    }
    specs.push_back(std::move(spec));
  }
  const GraphOptions options = holder.chain->options();
  holder.chain->reset();
  holder.chain = capture_chain(std::move(specs), options);
  step_.recaptures += static_cast<std::int64_t>(holder.chain->layers().size());
  mark_static_outputs();
}

void EngineState::follow_relocated_weights() {
  for (const auto& holder : own_chains_) {
    const std::vector<Layer>& layers = holder->chain->layers();
    const bool dropped =  // by a capture that failed in the place of this one
        std::any_of(layers.begin(), layers.end(), [](const Layer& layer) { return !layer.forward; });
    if (!dropped && !holder->chain->weights_relocated()) {
      continue;
    }
    if (options_.graph_options().on_relocated_weights() == OnChange::error) {
      throw UsageError(
          "parameters or buffers of graphed calls were relocated since the capture (load, Module::to); call "
          "OffloadEngine::reset, or set GraphOptions::on_relocated_weights to capture");
    }
    recapture(*holder);
  }
}

void EngineState::reset() {
  if (in_step_) {
    throw UsageError("OffloadEngine::reset inside a step; end the step first");
  }
  for (const auto& holder : own_chains_) {
    holder->chain->reset();
  }
  own_chains_.clear();
  for (CallSite& site : sites_) {
    site.variants.clear();
  }
  recorded_.clear();
  planned_.clear();
  sized_ = eager_planned_ = false;
  mark_static_outputs();
}

}  // namespace sidestream
