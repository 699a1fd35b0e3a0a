// Programs whose eager groups are saved and read on several streams. Each scope saves storages of its own.
#include <functional>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/scopes.h"
#include "sidestream/scope.h"
#include "unit/graphs/engine_program.h"

namespace sidestream::testing_model {
namespace {

class OnStreams : public EngineProgram, protected StreamPair {
 public:
  explicit OnStreams(const Runtimes& runtimes) : EngineProgram(runtimes), StreamPair(runtime()) {
    make_engine(model_, Options(device()).min_bytes(1024).groups_in_flight(1).offload("**"));
    for (std::uint64_t i = 0; i < 8; ++i) {
      auto generator = at::detail::createCPUGenerator(700 + i);
      inputs_.push_back(at::randn({64, 64}, generator).to(device()).requires_grad_(true));
    }
    runtime().synchronize_device();
  }
  ~OnStreams() override { end(); }

 protected:
  /// Two for each step.
  [[nodiscard]] const at::Tensor& input(std::int64_t s, std::int64_t which) const {
    return inputs_[(2 * s + which) % 8];
  }
  /// On the current stream and waiting for no other.
  static std::vector<at::Tensor> gradients(const at::Tensor& loss, const std::vector<at::Tensor>& inputs) {
    return torch::autograd::grad({loss}, inputs);
  }
  [[nodiscard]] TwoStreams two_streams() {
    const auto in_order = [this](c10::Stream earlier, c10::Stream later) { order(earlier, later); };
    return {a(), b(), in_order, in_order};
  }
  static at::Tensor scopes(const at::Tensor& x) { return through_scopes(x).sum(); }

 private:
  torch::nn::Module model_;
  std::vector<at::Tensor> inputs_;
};

/// A microbatch leaves into host slots that the other stream's microbatch of the step before came back from.
class StreamsThatNeverMeet final : public OnStreams {
 public:
  using OnStreams::OnStreams;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    std::vector<at::Tensor> grads;
    for (const std::int64_t microbatch : {0, 1}) {
      const c10::StreamGuard on_stream(by_turns(s + microbatch));
      const at::Tensor& x = input(s, microbatch);
      grads.push_back(gradients(scopes(x), {x})[0]);
    }
    return grads;
  }
};

/// The backward runs when its step has ended, and the next step leaves into the same host slots from another stream.
class BackwardAfterTheStep final : public OnStreams {
 public:
  using OnStreams::OnStreams;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_stream(by_turns(s));
    const at::Tensor& x = input(s, 0);
    at::Tensor loss;
    {
      const auto step = step_of_engine();
      loss = scopes(x);
      if (s == 0) {
        return gradients(loss, {x});  // the sizing pass is whole
      }
    }
    return gradients(loss, {x});
  }
};

/// A microbatch whose backward never runs goes, and the next one leaves into its host slots from another stream. A last one trails
/// when the step ends.
class ForwardsAlone final : public OnStreams {
 public:
  using OnStreams::OnStreams;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    std::vector<at::Tensor> grads;
    {
      const c10::StreamGuard on_a(a());
      grads.push_back(scopes(input(s, 0)).detach());
    }
    const c10::StreamGuard on_b(b());
    const at::Tensor& x = input(s, 1);
    grads.push_back(gradients(scopes(x), {x})[0]);
    grads.push_back(scopes(input(s, 0)).detach());
    return grads;
  }
};

/// Sources of one microbatch are let go while the other's forward runs.
class MicrobatchesInFlight final : public OnStreams {
 public:
  using OnStreams::OnStreams;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    std::vector<at::Tensor> losses;
    for (const std::int64_t microbatch : {0, 1}) {
      const c10::StreamGuard on_stream(by_turns(microbatch));
      losses.push_back(scopes(input(s, microbatch)));
    }
    std::vector<at::Tensor> grads;
    for (const std::int64_t microbatch : {0, 1}) {
      const c10::StreamGuard on_stream(by_turns(microbatch));
      grads.push_back(gradients(losses[microbatch], {input(s, microbatch)})[0]);
      losses[microbatch].reset();
      grads.push_back(grads.back().exp().mul(0.5).tanh());  // takes the memory that backward has freed
    }
    return grads;
  }
};

/// A branch of a scope runs on a stream of its own and is joined after the scope, as shared experts do.
class ForkInAScope final : public OnStreams {
 public:
  using OnStreams::OnStreams;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    const c10::StreamGuard on_a(a());
    const at::Tensor h = two_streams().forked_layers(input(s, 0), {"first", "second", "third"});
    return gradients(h.sum(), {input(s, 0)});
  }
};

/// One storage saved by operators on two streams: it leaves once, and its memory waits for both.
class SavedOnTwoStreams final : public OnStreams {
 public:
  using OnStreams::OnStreams;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    const c10::StreamGuard on_a(a());
    const at::Tensor h = two_streams().saved_on_both(input(s, 0));
    return gradients(h.sum(), {input(s, 0)});
  }
};

/// One storage is saved by a scope on one stream, and read by a later one on the other: the memory waits for both, though its copy is on
/// its way.
class ReadOnAnotherStream final : public OnStreams {
 public:
  /// `saves`: the later scope saves it too, and nothing else.
  ReadOnAnotherStream(const Runtimes& runtimes, bool saves) : OnStreams(runtimes), saves_(saves) {}
  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    const c10::StreamGuard on_a(a());
    at::Tensor first;
    at::Tensor again;
    {
      const at::Tensor shared = input(s, 0) * 2;
      first = scoped("first", [&] { return shared.sigmoid() * shared; });
      order(a(), b());
      const c10::StreamGuard on_b(b());
      again = scoped("again", [&] { return saves_ ? shared * shared : (shared * 3).tanh(); });
    }
    const at::Tensor later = through_scopes(first);
    order(b(), a());
    auto grads = gradients((later + again).sum(), {input(s, 0)});
    order(b(), a());
    return grads;
  }

 private:
  static at::Tensor scoped(const char* name, const std::function<at::Tensor()>& body) {
    OffloadScope scope(name);
    at::Tensor result = body();
    scope.end();
    return result;
  }
  bool saves_;
};

/// A loader makes the next batch on a stream of its own while a batch is used, and waits for the backward before the batch's memory is free.
/// In plain training autograd keeps the batch until then. Here the batch is copied out and its memory freed earlier.
class LoaderOnAnotherStream final : public OnStreams {
 public:
  using OnStreams::OnStreams;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    at::Tensor batch = load(s);
    order(b(), a());
    const c10::StreamGuard on_a(a());
    OffloadScope scope("batch");
    at::Tensor h = input(s, 0) * batch;
    scope.end();
    batch.reset();
    h = scopes(h);
    const at::Tensor next = load(s + 1);
    auto grads = torch::autograd::grad({h}, {input(s, 0)}, {}, true);
    order(a(), b());
    grads.push_back(next);
    return grads;
  }

 private:
  [[nodiscard]] at::Tensor load(std::int64_t s) {
    const c10::StreamGuard on_b(b());
    return input(s, 1).detach() * 2;
  }
};

/// Where the backward of a product reads its first input, as trainers that overlap weight gradients do.
struct BesideTheBackward {
  std::function<void(c10::Stream, c10::Stream)> in_order;
  std::function<c10::Stream()> current;
  c10::Stream stream;
  bool unpacks;  ///< the input is unpacked on that stream too; it is its memory
  std::vector<at::Tensor> read;
};

struct ProductReadBeside : torch::autograd::Function<ProductReadBeside> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& h,
                            BesideTheBackward* beside) {
    context->save_for_backward({x});
    context->saved_data["beside"] = reinterpret_cast<std::int64_t>(beside);  // the program outlives its backward
    return h * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    auto& beside = *reinterpret_cast<BesideTheBackward*>(context->saved_data["beside"].toInt());
    grads[0].record_stream(beside.stream);
    at::Tensor x = context->get_saved_variables()[0];
    at::Tensor grad = grads[0] * x;
    beside.in_order(beside.current(), beside.stream);
    const c10::StreamGuard on_it(beside.stream);
    if (beside.unpacks) {
      x = context->get_saved_variables()[0];
    }
    beside.read.push_back((x * grads[0]).tanh() * x);
    return {at::Tensor(), grad, at::Tensor()};
  }
};

class ReadBesideTheBackward final : public OnStreams {
 public:
  enum class Reader : std::uint8_t { named, named_and_released, unpacks };
  ReadBesideTheBackward(const Runtimes& runtimes, Reader reader)
      : OnStreams(runtimes),
        releases_(reader == Reader::named_and_released),
        beside_{[this](c10::Stream earlier, c10::Stream later) { order(earlier, later); },
                [this] { return runtime().current_stream(); },
                b(),
                reader == Reader::unpacks,
                {}} {}
  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    at::Tensor x;
    {
      const c10::StreamGuard on_it(beside_.unpacks ? b() : a());
      x = input(s, 1).detach() * 2;
    }
    order(b(), a());
    if (!beside_.unpacks) {
      x.record_stream(b());
    }
    const c10::StreamGuard on_a(a());
    OffloadScope scope("product");
    const at::Tensor h = ProductReadBeside::apply(x, input(s, 0) * 1.5, &beside_);
    scope.end();
    if (releases_ && engine_) {
      scope.release(x);
    }
    x.reset();
    auto grads = gradients(scopes(h), {input(s, 0)});
    for (int i = 0; i < 6; ++i) {  // takes memory that backward freed
      grads.push_back((grads.back() * 0.5).tanh() + grads[0]);
    }
    order(b(), a());
    for (const at::Tensor& read : std::exchange(beside_.read, {})) {
      grads.push_back(read);
    }
    return grads;
  }

 private:
  bool releases_;
  BesideTheBackward beside_;
};

/// A reloaded storage is read by the backward of two streams, and its memory is used again while one of them may be at it.
class ReadBackOnTwoStreams final : public OnStreams {
 public:
  using OnStreams::OnStreams;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    const c10::StreamGuard on_a(a());
    const at::Tensor& x = input(s, 0);
    const at::Tensor& weight = input(s, 1);
    const auto [p, branch] = two_streams().read_back_on_both(x, weight);
    return gradients(p.sum() + branch.sum(), {x, weight});
  }
};

/// When memory that an unused reload may still write is used again.
enum class Again : std::uint8_t { in_the_step, after_the_step, after_a_later_step };

/// Every other backward stops half-way: a group that was on its way back is dropped, and its memory used again on the model's stream, which
/// is not the one that the step ends on.
class UnusedReload final : public OnStreams {
 public:
  UnusedReload(const Runtimes& runtimes, Again again) : OnStreams(runtimes), again_(again) {}
  std::vector<at::Tensor> step(std::int64_t s) override {
    auto step = step_of_engine();
    at::Tensor h;
    at::Tensor middle;
    std::vector<at::Tensor> grads;
    {
      const c10::StreamGuard on_a(a());
      middle = through_scopes(input(s, 0), {"first", "second"});
      h = through_scopes(middle, {"third", "fourth"});
    }
    if (again_ == Again::after_a_later_step) {
      step.reset();
      if (auto later = step_of_engine()) {
        step.emplace(std::move(*later));
      }
    }
    {
      const c10::StreamGuard on_a(a());
      grads = gradients(h.sum(), {s % 2 == 0 ? input(s, 0) : middle});
      middle.reset();
      h.reset();
      if (again_ == Again::in_the_step) {
        grads.push_back(use(grads[0]));
      }
    }
    step.reset();
    const c10::StreamGuard on_a(a());
    grads.push_back(use(grads[0]));
    return grads;
  }

 private:
  /// Takes whatever was freed.
  static at::Tensor use(const at::Tensor& from) {
    at::Tensor sum = from;
    std::vector<at::Tensor> taken;
    for (int i = 0; i < 8; ++i) {
      taken.push_back(taken.empty() ? from.mul(0.5) : taken.back().mul(1.5));
    }
    for (const at::Tensor& each : taken) {
      sum = sum + each;
    }
    return sum;
  }
  Again again_;
};

}  // namespace

std::vector<NamedProgram> stream_programs() {
  return {named_program<StreamsThatNeverMeet>("streams_that_never_meet"),
          named_program<BackwardAfterTheStep>("backward_after_the_step"),
          named_program<ForwardsAlone>("forwards_alone"),
          named_program<MicrobatchesInFlight>("microbatches_in_flight"),
          named_program<ForkInAScope>("fork_in_a_scope"),
          named_program<SavedOnTwoStreams>("saved_on_two_streams"),
          named_program<ReadOnAnotherStream>("saved_again_on_another_stream", true),
          named_program<ReadOnAnotherStream>("read_on_another_stream", false),
          named_program<LoaderOnAnotherStream>("loader_on_another_stream"),
          named_program<ReadBesideTheBackward>("read_on_a_named_stream", ReadBesideTheBackward::Reader::named),
          named_program<ReadBesideTheBackward>("released_and_read_on_a_named_stream",
                                               ReadBesideTheBackward::Reader::named_and_released),
          named_program<ReadBesideTheBackward>("unpacked_on_another_stream", ReadBesideTheBackward::Reader::unpacks),
          named_program<ReadBackOnTwoStreams>("read_back_on_two_streams"),
          named_program<UnusedReload>("unused_reload_in_the_step", Again::in_the_step),
          named_program<UnusedReload>("unused_reload_after_the_step", Again::after_the_step),
          named_program<UnusedReload>("unused_reload_after_a_later_step", Again::after_a_later_step)};
}

}  // namespace sidestream::testing_model
