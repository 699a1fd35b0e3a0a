// Programs of two sequences in one pool, which they use by turns.
#include <optional>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include "graphs/engine/engine_access.h"
#include "models/layer_stack.h"
#include "sidestream/engine.h"
#include "sidestream/graph_pool.h"
#include "unit/graphs/ordered_programs.h"

namespace sidestream::testing_model {
namespace {

/// How a pass of the first sequence ends before the second one's begins.
enum class FirstPass : std::uint8_t {
  whole,
  given_up,  ///< no backward: its copies out are under way
  cut,       ///< only the last layer's backward, which brings the others' tensors back
};

class TurnsInOnePool final : public Program {
 public:
  TurnsInOnePool(const Runtimes& runtimes, FirstPass first, bool two_streams)
      : runtime_(runtimes.model),
        beside_(runtime_->create_stream()),
        first_(first),
        two_streams_(two_streams),
        model_(layer_stack(2 * kLayers, runtime_->device())) {
    if (runtimes.engine == nullptr) {
      return;
    }
    const Options options = Options(device()).offload("layers.*.*").min_bytes(1024).lookahead(1_GiB);
    engine_.emplace(EngineAccess::engine(*model_, options, runtimes.engine));
    const auto pool = std::make_shared<GraphPool>(device());
    for (std::size_t begin = 0; begin < 2 * kLayers; begin += kLayers) {
      std::vector<Callable> callables;
      std::vector<std::vector<Sample>> samples;
      for (std::size_t i = begin; i < begin + kLayers; ++i) {
        const bool own = i == begin || i + 1 == begin + kLayers;
        samples.push_back({own ? Sample(rows(900, device()).requires_grad_(true))
                               : Sample::output_of(static_cast<std::int64_t>(i - begin) - 1)});
        callables.emplace_back("layers." + std::to_string(i), *(model_->begin() + static_cast<std::ptrdiff_t>(i)));
      }
      for (GraphedCallable& layer :
           make_graphed_callables(*engine_, std::move(callables), samples, GraphOptions().pool(pool))) {
        layers_.push_back(std::move(layer));
      }
    }
  }
  ~TurnsInOnePool() override { runtime_->synchronize_device(); }
  [[nodiscard]] const OffloadEngine* engine() const override { return engine_ ? &*engine_ : nullptr; }

  std::vector<at::Tensor> step(std::int64_t s) override {
    std::vector<at::Tensor> results;
    if (two_streams_) {  // which never meet
      const c10::StreamGuard on_stream(s % 2 == 0 ? runtime_->current_stream() : beside_.get());
      pass(s % 2 == 0 ? 0 : kLayers, s, 0, results);
      return results;
    }
    for (std::int64_t turn = 0; turn < 2; ++turn) {
      const std::int64_t salt = 10 * turn;
      first_pass(s, salt, results);
      pass(kLayers, s, salt + 4, results);
    }
    return results;
  }

 private:
  static constexpr std::size_t kLayers = 5;

  [[nodiscard]] c10::Device device() const { return runtime_->device(); }
  at::Tensor run(std::size_t first, std::size_t last, at::Tensor h) {
    for (std::size_t i = first; i < last; ++i) {
      h = engine_ ? layers_[i]({h})[0] : (model_->begin() + static_cast<std::ptrdiff_t>(i))->forward(h);
    }
    return h;
  }
  void pass(std::size_t begin, std::int64_t s, std::int64_t salt, std::vector<at::Tensor>& results) {
    const at::Tensor x = rows(s, device(), salt).requires_grad_(true);
    const at::Tensor y = run(begin, begin + kLayers, x);
    (y * rows(s, device(), salt + 1)).sum().backward();
    results.push_back(x.grad());
    results.push_back(y.detach());  // held while the other sequence computes
    take_gradients(begin, results);
  }
  /// Of the layers of one sequence.
  void take_gradients(std::size_t begin, std::vector<at::Tensor>& results) {
    for (std::size_t i = begin; i < begin + kLayers; ++i) {
      for (at::Tensor& parameter : (model_->begin() + static_cast<std::ptrdiff_t>(i))->ptr()->parameters()) {
        if (parameter.grad().defined()) {
          results.push_back(parameter.grad());
          parameter.mutable_grad() = at::Tensor();
        }
      }
    }
  }
  void first_pass(std::int64_t s, std::int64_t salt, std::vector<at::Tensor>& results) {
    switch (first_) {
      case FirstPass::whole:
        pass(0, s, salt, results);
        break;
      case FirstPass::given_up: {
        const at::Tensor y = run(0, kLayers - 1, rows(s, device(), salt).requires_grad_(true));
        break;
      }
      case FirstPass::cut: {
        const at::Tensor low = run(0, kLayers - 1, rows(s, device(), salt).requires_grad_(true));
        const at::Tensor cut = low.detach().clone().requires_grad_(true);
        (run(kLayers - 1, kLayers, cut) * rows(s, device(), salt + 1)).sum().backward();
        results.push_back(cut.grad());
        take_gradients(0, results);
        break;
      }
    }
  }

  std::shared_ptr<Runtime> runtime_;
  OwnedStream beside_;
  FirstPass first_;
  bool two_streams_;
  torch::nn::Sequential model_;
  std::optional<OffloadEngine> engine_;
  std::vector<GraphedCallable> layers_;
};

}  // namespace

std::vector<NamedProgram> pool_programs() {
  const auto make = [](FirstPass first, bool two_streams) {
    return [first, two_streams](const Runtimes& runtimes) -> std::unique_ptr<Program> {
      return std::make_unique<TurnsInOnePool>(runtimes, first, two_streams);
    };
  };
  return {{"one_pool", make(FirstPass::whole, false)},
          {"one_pool_streams", make(FirstPass::whole, true)},
          {"one_pool_given_up", make(FirstPass::given_up, false)},
          {"one_pool_cut", make(FirstPass::cut, false)}};
}

}  // namespace sidestream::testing_model
