#include "graphs/sandbox/sandbox.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "memory/storage_view.h"

namespace sidestream {
namespace {

constexpr std::uint64_t kOtherSeed = 0x5bd1e995;  // differs in bits that every generator uses

/// The separate sequence of each generator that had a guard and is alive.
struct Sequences {
  using Weak = c10::weak_intrusive_ptr<c10::GeneratorImpl>;
  std::mutex mutex;
  std::vector<std::pair<Weak, at::Generator>> all;

  at::Generator& of(const at::Generator& generator) {
    std::erase_if(all, [](const auto& item) { return item.first.expired(); });
    for (auto& [known, sequence] : all) {
      if (known._unsafe_get_target() == generator.unsafeGetGeneratorImpl()) {
        return sequence;
      }
    }
    at::Generator sequence = generator.clone();
    sequence.set_current_seed(generator.current_seed() ^ kOtherSeed);
    return all.emplace_back(Weak(generator.getIntrusivePtr()), std::move(sequence)).second;
  }
};

Sequences& sequences() {
  static auto* const instance = new Sequences();  // threads may end after static objects
  return *instance;
}

bool has_storage(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.has_storage() && !impl.is_wrapped_number() && impl.unsafe_storage().unsafeGetStorageImpl() != nullptr;
}

}  // namespace

GeneratorState::GeneratorState(at::Generator of) : generator(std::move(of)) {
  const std::lock_guard drawing(generator.mutex());
  state = generator.get_state();
}

void GeneratorState::put_back() const {
  at::Generator drawn = generator;
  const std::lock_guard drawing(drawn.mutex());
  drawn.set_state(state);
}

// Operators look up the state and draw from it under the generator's lock, so each uses one of the two sequences only.
RngStateGuard::RngStateGuard(at::Generator generator) : generator_(std::move(generator)) {
  const std::lock_guard drawing(generator_.mutex());
  const std::lock_guard lock(sequences().mutex);
  shared_ = generator_.graphsafe_get_state();
  before_ = generator_.get_state();
  at::Generator& sequence = sequences().of(generator_);
  own_seed_ = sequence.current_seed();
  generator_.graphsafe_set_state(sequence);
}

void RngStateGuard::take_seed() {
  taken_ = generator_.current_seed();
  generator_.set_current_seed(++own_seed_);
}

RngStateGuard::~RngStateGuard() {
  try {
    const std::lock_guard drawing(generator_.mutex());
    const std::lock_guard lock(sequences().mutex);
    at::Generator& sequence = sequences().of(generator_);
    if (is_seeded()) {
      sequence.set_current_seed(own_seed_ + 1);
    } else {
      sequence = generator_.graphsafe_get_state();
    }
    shared_.set_state(before_);
    if (taken_) {
      shared_.set_current_seed(*taken_);
    }
    generator_.graphsafe_set_state(shared_);
  } catch (const std::exception& error) {  // a device that fails here has failed the run already
    std::fprintf(stderr, "sidestream: the random generator could not be restored after a warm-up: %s\n", error.what());
  }
}

struct Sandbox::Hooks {
  at::Tensor leaf;  // keeps `meta` alive
  torch::autograd::AutogradMeta* meta;
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> hooks;
  bool accumulator_hidden;
  std::weak_ptr<torch::autograd::Node> accumulator;
};

void Sandbox::WrittenStorages::keep(const c10::Storage& storage) {
  const c10::StorageImpl* const key = storage.unsafeGetStorageImpl();
  if (key == nullptr || storage.nbytes() == 0 || kept_.contains(key)) {
    return;
  }
  forget_dead();
  const at::NoGradGuard no_grad;
  const at::Tensor bytes = bytes_of(storage);
  // The operator that writes the storage cannot be stopped here. So the bytes are kept on the host if the device is full.
  const at::Tensor copy = [&] {
    try {
      return bytes.clone();
    } catch (const std::exception&) {
      return bytes.cpu();
    }
  }();
  kept_.emplace(key, Kept(storage.getWeakStorageImpl(), copy));
}

void Sandbox::WrittenStorages::put_back() {
  const at::NoGradGuard no_grad;
  for (auto& [key, kept] : kept_) {
    if (auto alive = kept.first.lock()) {
      const c10::Storage storage(std::move(alive));
      const auto bytes = static_cast<std::int64_t>(storage.nbytes());
      if (bytes >= kept.second.numel()) {  // a smaller storage was resized: its old bytes are lost
        bytes_of(storage).narrow(0, 0, kept.second.numel()).copy_(kept.second, /*non_blocking=*/!kept.second.is_cpu());
      }
    }
  }
  kept_.clear();
}

void Sandbox::WrittenStorages::forget_dead() {
  std::erase_if(kept_, [](const auto& kept) { return kept.second.first.expired(); });
}

Sandbox::Sandbox() = default;

Sandbox::~Sandbox() {
  try {
    put_back();
  } catch (const std::exception& error) {  // a device that fails here fails the run or the next call, too
    std::fprintf(stderr, "sidestream: what a warm-up, a capture or a verification wrote could not be restored: %s\n",
                 error.what());
  }
}

void Sandbox::put_back() {
  observer_.reset();
  for (; !hooks_.empty(); hooks_.pop_back()) {
    Hooks& hidden = hooks_.back();
    std::swap(hidden.meta->hooks_, hidden.hooks);
    if (hidden.accumulator_hidden) {
      hidden.meta->grad_accumulator_ = std::move(hidden.accumulator);
    }
  }
  for (; !gradients_.empty(); gradients_.pop_back()) {  // backwards: a shared parameter's first entry is the true one
    auto& [leaf, gradient] = gradients_.back();
    if (gradient.defined() || leaf.grad().defined()) {
      leaf.mutable_grad() = gradient;
    }
  }
  for (const GeneratorState& state : states_) {
    state.put_back();
  }
  states_.clear();
  draws_.clear();
  const UnobservedGuard unobserved;
  for (auto& [buffer, before] : buffers_) {
    if (!buffer.is_alias_of(before)) {
      buffer.set_data(before);
    }
  }
  buffers_.clear();
  written_.put_back();
}

void Sandbox::hide_gradients(const std::vector<at::Tensor>& leaves) {
  for (const at::Tensor& leaf : leaves) {
    gradients_.emplace_back(leaf, leaf.grad());
    if (leaf.grad().defined()) {
      leaf.mutable_grad() = at::Tensor();
    }
  }
}

void Sandbox::hide(const at::Tensor& leaf, bool accumulator) {
  const bool known = std::any_of(hooks_.begin(), hooks_.end(), [&](const Hooks& h) { return h.leaf.is_same(leaf); });
  if (auto* meta = torch::autograd::impl::get_autograd_meta(leaf); meta != nullptr && !known) {
    Hooks& hidden = hooks_.emplace_back(Hooks{leaf, meta, {}, accumulator, {}});
    std::swap(meta->hooks_, hidden.hooks);
    if (accumulator) {
      std::swap(meta->grad_accumulator_, hidden.accumulator);
    }
  }
}

void Sandbox::hide_hooks(const std::vector<at::Tensor>& leaves) {
  for (const at::Tensor& leaf : leaves) {
    hide(leaf, /*accumulator=*/false);
  }
}

void Sandbox::hide_hooks_and_accumulators(const std::vector<at::Tensor>& leaves) {
  for (const at::Tensor& leaf : leaves) {
    hide(leaf, /*accumulator=*/true);
  }
}

void Sandbox::keep_bytes(const c10::Storage& storage) { written_.keep(storage); }

void Sandbox::keep_buffers(const std::vector<at::Tensor>& buffers) {
  for (const at::Tensor& buffer : buffers) {
    if (buffer.defined() && has_storage(buffer)) {
      written_.keep(buffer.storage());
      buffers_.emplace_back(buffer, buffer.variable_data());
    }
  }
}

void Sandbox::watch_writes() {
  observer_.emplace([this](const OperatorAccess& access) { after(access); },
                    [this](const OperatorAccess& access) { before(access); });
}

void Sandbox::check() const {
  if (observer_) {
    observer_->rethrow();
  }
}

void Sandbox::before(const OperatorAccess& access) {
  if (access.only_shape) {
    return;
  }
  for (const at::Tensor& tensor : access.writes) {
    if (has_storage(tensor) && !made_.contains(tensor.storage().unsafeGetStorageImpl())) {
      written_.keep(tensor.storage());
      temporaries_ = temporaries_ || access.nested;
    }
  }
}

// An operator writes the memory of its result before the observer learns that the result is new.
void Sandbox::after(const OperatorAccess& access) {
  for (const at::Tensor& output : access.outputs) {
    if (!has_storage(output)) {
      continue;
    }
    const c10::StorageImpl* const key = output.storage().unsafeGetStorageImpl();
    const auto same = [key](const at::Tensor& tensor) {
      return has_storage(tensor) && tensor.storage().unsafeGetStorageImpl() == key;
    };
    if (std::none_of(access.reads.begin(), access.reads.end(), same)) {
      made_.insert(output.storage());
      written_.forget(key);
    }
  }
  if (temporaries_ && !access.nested) {
    written_.forget_dead();
    temporaries_ = false;
  }
}

void Sandbox::keep_state(GeneratorState state) {
  const auto known = [&](const GeneratorState& other) { return other.generator == state.generator; };
  if (std::none_of(states_.begin(), states_.end(), known)) {
    states_.push_back(std::move(state));
  }
}

void Sandbox::draw_apart(const std::vector<at::Generator>& generators) {
  for (const at::Generator& generator : generators) {
    draws_.emplace_back(generator);
  }
}

}  // namespace sidestream
