// clang-format off
// Calls that must not compile: each marked line is the place of one error, whose message holds the text of the mark.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include "sidestream/sidestream.h"

namespace ss = sidestream;
using at::Tensor;

struct NoEquality {
  int value;
};
struct NotJoined {
  int value;
  bool operator==(const NotJoined& other) const { return value == other.value; }
};
template <>
struct sidestream::ArgumentTraits<NoEquality> : sidestream::ComparedByValue {};

struct Rope {
  Tensor cosines, sines;
};

struct Block : torch::nn::Module {
  template <class... Args>
  Tensor forward(Tensor x, const Args&... /*args*/) {
    return x;
  }
};
struct Strict : torch::nn::Module {
  Tensor forward(Tensor x, Tensor* out);
};
struct Count : torch::nn::Module {
  std::int64_t forward(Tensor x);
};

void arguments(Block* block, Tensor x, Rope rope, at::IntArrayRef sizes, std::optional<at::IntArrayRef> maybe) {
  std::vector<std::int64_t> owned{1, 2};
  std::string text;
  ss::call(block, x, sizes);                           // refused: std::vector<int64_t> in place of at::IntArrayRef
  ss::call(block, x, maybe);                           // refused: only borrows its memory
  ss::call(block, x, at::TensorList(x));               // refused: std::vector<at::Tensor> in place of at::TensorList
  ss::call(block, x, at::OptionalIntArrayRef(owned));  // refused: only borrows its memory
  ss::call(block, x, std::string_view(text));          // refused: std::string in place of std::string_view
  ss::call(block, x, std::vector<std::string_view>{});  // refused: only borrows its memory
  ss::call(block, x, std::ref(owned));                 // refused: the object in place of std::reference_wrapper
  ss::call(block, x, &owned);                          // refused: is a pointer
  ss::call(block, x, &x);                              // refused: ss::stays(p) for a tensor
  ss::call(block, x, block);                           // refused: the module itself for a module
  ss::call(block, x, owned.data());                    // refused: is a pointer
  ss::call(block, x, std::make_shared<Rope>(rope));    // refused: ss::stays(shared_ptr)
  ss::call(block, x, std::make_unique<int>(3));        // refused: is a smart pointer
  ss::call(block, x, std::function<void()>());         // refused: is a std::function
  ss::call(block, x, [owned] { return owned; });       // refused: neither a tensor, a module, a value
  ss::call(block, x, NotJoined{1});                    // refused: sidestream::ComparedByValue
  ss::call(block, x, std::vector<NotJoined>{});        // refused: neither a tensor, a module, a value
  ss::call(block, x, NoEquality{1});                   // refused: it has no operator==
  ss::call(block, x, rope);                            // refused: neither a tensor, a module, a value
  ss::call(block, x, Block());                         // refused: not as a temporary
  ss::call(block, x, ss::stays(&rope));                // refused: ss::outlives_engine(pointer)
  ss::call(block, x, ss::stays(block));                // refused: the module itself
  ss::call(block, x, ss::outlives_engine(block));      // refused: its weights are watched
}

void modules(torch::nn::ModuleList blocks, Strict* strict, Count* count, Tensor x) {
  ss::call(blocks[0], x);                    // refused: ss::call(block->as<Block>(), ...)
  ss::call(strict, x);                       // refused: cannot be called with these arguments
  ss::call(strict, x, ss::stays(&x));        // refused: cannot be called with these arguments
  ss::call(count, x);                        // refused: would be frozen at its first value
}

void functions(Tensor x, torch::nn::Linear linear, double factor) {
  ss::call("f", [factor](Tensor y) { return y * factor; }, x);                   // refused: wrap it in ss::owning
  ss::call("f", [&](Tensor y) { return y * factor; }, x);                        // refused: holds state
  ss::call("f", std::function<Tensor(Tensor)>(), x);                             // refused: holds state
  ss::call("f", linear, x);                                                      // refused: ss::call(module, ...)
  ss::call("f", [](Tensor y, Tensor z) { return y * z; }, x);                    // refused: cannot be called with these
  ss::Callable("c", [factor](const ss::Tensors& in) { return in; });             // refused: wrap the function in ss::owning
  ss::Callable("c", ss::TensorFunction());                                       // refused: holds state
  ss::Callable("c", [](const ss::Tensors& in) { return in; }, linear);           // refused: gets it as an argument
  ss::Callable("c", [](Tensor in) { return in; });                               // refused: takes (const ss::Tensors&)
}
