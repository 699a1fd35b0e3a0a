// Programs of two sequences in one pool, which they use by turns.
#include <memory>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include "sidestream/graph_pool.h"
#include "unit/graphs/engine_program.h"

namespace sidestream::testing_model {
namespace {

/// How a pass of the first sequence ends before the second one's begins.
enum class FirstPass : std::uint8_t {
  whole,
  given_up,  ///< no backward: its copies out are under way
  cut,       ///< only the last layer's backward, which brings the others' tensors back
};

class TurnsInOnePool final : public StackProgram {
 public:
  TurnsInOnePool(const Runtimes& runtimes, FirstPass first, bool two_streams)
      : StackProgram(runtimes, 2 * kLayers),
        beside_(runtime().create_stream()),
        first_(first),
        two_streams_(two_streams) {
    if (make_engine(*model_, stack_options().lookahead(1_GiB))) {
      const auto pool = std::make_shared<GraphPool>(device());
      for (const std::size_t begin : {std::size_t{0}, kLayers}) {
        capture_linked(callables(begin, begin + kLayers), GraphOptions().pool(pool),
                       [](std::size_t layer) { return layer + 1 == kLayers; });
      }
    }
  }
  ~TurnsInOnePool() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    std::vector<at::Tensor> results;
    if (two_streams_) {  // which never meet
      const c10::StreamGuard on_stream(s % 2 == 0 ? runtime().current_stream() : beside_.get());
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

  void pass(std::size_t begin, std::int64_t s, std::int64_t salt, std::vector<at::Tensor>& results) {
    const at::Tensor x = rows_of(s, salt).requires_grad_(true);
    const at::Tensor y = run(begin, begin + kLayers, x);
    (y * rows_of(s, salt + 1)).sum().backward();
    results.push_back(x.grad());
    results.push_back(y.detach());  // held while the other sequence computes
    take_gradients(begin, results);
  }
  /// Of the layers of one sequence.
  void take_gradients(std::size_t begin, std::vector<at::Tensor>& results) {
    for (std::size_t i = begin; i < begin + kLayers; ++i) {
      for (at::Tensor& parameter : layer(i).ptr()->parameters()) {
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
        const at::Tensor y = run(0, kLayers - 1, rows_of(s, salt).requires_grad_(true));
        break;
      }
      case FirstPass::cut: {
        const at::Tensor low = run(0, kLayers - 1, rows_of(s, salt).requires_grad_(true));
        const at::Tensor cut = low.detach().clone().requires_grad_(true);
        (run(kLayers - 1, kLayers, cut) * rows_of(s, salt + 1)).sum().backward();
        results.push_back(cut.grad());
        take_gradients(0, results);
        break;
      }
    }
  }

  OwnedStream beside_;
  FirstPass first_;
  bool two_streams_;
};

}  // namespace

std::vector<NamedProgram> pool_programs() {
  return {named_program<TurnsInOnePool>("one_pool", FirstPass::whole, false),
          named_program<TurnsInOnePool>("one_pool_streams", FirstPass::whole, true),
          named_program<TurnsInOnePool>("one_pool_given_up", FirstPass::given_up, false),
          named_program<TurnsInOnePool>("one_pool_cut", FirstPass::cut, false)};
}

}  // namespace sidestream::testing_model
