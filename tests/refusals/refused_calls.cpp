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

struct Viewed {
  Tensor table;
  std::string_view name;
};
struct Sized {
  Tensor table;
  at::IntArrayRef sizes;
};
struct Listing {
  Tensor table;
  std::vector<at::TensorList> lists;
};
struct Pointing {
  Tensor table;
  const float* scale;
};
struct Chained {
  Tensor table;
  const Rope* rope;
};
struct Sharing {
  Tensor table;
  std::shared_ptr<Rope> rope;
};
struct Array {
  Tensor tables[2];
};
struct Nested {
  Rope rope;
};
struct Fixed {
  const Tensor table;
};
struct Counted {
  Tensor table;
  std::int64_t count;
};
struct Referring {
  Tensor table;
  Tensor& other;
};
struct Flagged {
  Tensor table;
  unsigned flag : 1;
};
struct Longer : Counted {
  Tensor more;
};
struct Placed {
  Tensor table;
  c10::Device device;  // has no default
};
struct Mixed {
  Tensor table;
  std::string name;
};
struct Twice {
  Tensor a, b;
};
struct Method {
  Tensor table;
  Tensor of(std::int64_t i) const;
};
struct Virtual {
  virtual ~Virtual() = default;
  Tensor table;
};
struct Owner {
  Tensor table;
  std::unique_ptr<int> own;
};
class Single {
 public:
  Single(const Single&) = delete;
  Tensor table;
};
struct Defaulted {
  Tensor table;
  c10::Device device = c10::kCPU;  // has no other default
};
struct Text {
  Tensor table;
  char name[16];
};
template <> struct sidestream::ArgumentTraits<Viewed> : sidestream::Members<&Viewed::table, &Viewed::name> {};
template <> struct sidestream::ArgumentTraits<Sized> : sidestream::Members<&Sized::table, &Sized::sizes> {};
template <> struct sidestream::ArgumentTraits<Listing> : sidestream::Members<&Listing::table, &Listing::lists> {};
template <> struct sidestream::ArgumentTraits<Pointing> : sidestream::Members<&Pointing::table, &Pointing::scale> {};
template <> struct sidestream::ArgumentTraits<Chained> : sidestream::Members<&Chained::table, &Chained::rope> {};
template <> struct sidestream::ArgumentTraits<Sharing> : sidestream::Members<&Sharing::table, &Sharing::rope> {};
template <> struct sidestream::ArgumentTraits<Array> : sidestream::Members<&Array::tables> {};
template <> struct sidestream::ArgumentTraits<Nested> : sidestream::Members<&Nested::rope> {};
template <> struct sidestream::ArgumentTraits<Fixed> : sidestream::Members<&Fixed::table> {};
template <> struct sidestream::ArgumentTraits<Counted> : sidestream::Members<&Counted::table> {};
template <> struct sidestream::ArgumentTraits<Referring> : sidestream::Members<&Referring::table> {};
template <> struct sidestream::ArgumentTraits<Flagged> : sidestream::Members<&Flagged::table> {};
template <> struct sidestream::ArgumentTraits<Longer> : sidestream::Members<&Longer::table, &Longer::count> {};
template <> struct sidestream::ArgumentTraits<Placed> : sidestream::Members<&Placed::table> {};
template <> struct sidestream::ArgumentTraits<Mixed> : sidestream::Members<&Mixed::name, &Mixed::table> {};
template <> struct sidestream::ArgumentTraits<Twice> : sidestream::Members<&Twice::a, &Twice::a> {};
template <> struct sidestream::ArgumentTraits<Method> : sidestream::Members<&Method::table, &Method::of> {};
template <> struct sidestream::ArgumentTraits<Virtual> : sidestream::Members<&Virtual::table> {};
template <> struct sidestream::ArgumentTraits<Owner> : sidestream::Members<&Owner::table, &Owner::own> {};
template <> struct sidestream::ArgumentTraits<Single> : sidestream::Members<&Single::table> {};
template <> struct sidestream::ArgumentTraits<Defaulted> : sidestream::Members<&Defaulted::table> {};
template <> struct sidestream::ArgumentTraits<Text> : sidestream::Members<&Text::table, &Text::name> {};

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

template <class T>
const T& any();

void structs(Block* block, Tensor x, Rope* rope, Counted* counted) {
  ss::call(block, x, rope);                  // refused: list the members of a struct of tensors (sidestream::Members)
  ss::call(block, x, std::optional(*rope));  // refused: sidestream::Members<&T::a, &T::b>
  ss::call(block, x, any<Viewed>());         // refused: std::string in place of std::string_view
  ss::call(block, x, any<Sized>());          // refused: std::vector in place of an ArrayRef or a span
  ss::call(block, x, &any<Listing>());       // refused: only borrows its memory
  ss::call(block, x, any<Pointing>());       // refused: a member in sidestream::Members is a pointer
  ss::call(block, x, any<Chained>());        // refused: hold the tensor, the value or the struct itself
  ss::call(block, x, any<Sharing>());        // refused: a member in sidestream::Members is a pointer
  ss::call(block, x, any<Array>());          // refused: declare it as std::array
  ss::call(block, x, any<std::vector<Nested>>());  // refused: give a struct ArgumentTraits of its own
  ss::call(block, x, any<Fixed>());          // refused: declare it without const
  ss::call(block, x, counted);               // refused: leaves out a member of this struct
  ss::call(block, x, any<Referring>());      // refused: leaves out a member of this struct
  ss::call(block, x, any<Flagged>());        // refused: a member that cannot be listed (a reference, a bit-field)
  ss::call(block, x, any<Longer>());         // refused: leaves out a member of this struct
  ss::call(block, x, any<Placed>());         // refused: leaves out a member of this struct
  ss::call(block, x, any<Mixed>());          // refused: in the order of declaration
  ss::call(block, x, any<Twice>());          // refused: lists a member of this struct twice
  ss::call(block, x, any<Method>());         // refused: is not a data member
  ss::call(block, x, any<Virtual>());        // refused: has virtual functions
  ss::call(block, x, any<Owner>());          // refused: a member in sidestream::Members is a pointer
  ss::call(block, x, any<Single>());         // refused: cannot be copied
  ss::call(block, x, any<Defaulted>());      // refused: leaves out a member of this struct
  ss::call(block, x, any<Text>());           // refused: declare it as std::array
  ss::call(block, x, std::make_shared<Longer>());  // refused: ss::stays(shared_ptr)
  ss::call(block, x, std::vector<Longer*>());      // refused: neither a tensor, a module, a value
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
  ss::call("f", [](Tensor) { return std::optional<const char*>(); }, x);         // refused: would be frozen at its first value
  ss::call("f", [](Tensor) { return std::make_pair(Tensor(), 1); }, x);          // refused: would be frozen at its first value
  ss::call("f", [](Tensor) { return std::vector<torch::nn::Linear>(); }, x);     // refused: would be frozen at its first value
  ss::call("f", [](Tensor) { return any<Listing>(); }, x);                       // refused: would be frozen at its first value
  ss::call("f", [](Tensor) {}, x);                                               // refused: would be frozen at its first value
  ss::Callable("c", [factor](const ss::Tensors& in) { return in; });             // refused: wrap the function in ss::owning
  ss::Callable("c", ss::TensorFunction());                                       // refused: holds state
  ss::Callable("c", [](const ss::Tensors& in) { return in; }, linear);           // refused: gets it as an argument
  ss::Callable("c", [](Tensor in) { return in; });                               // refused: takes (const ss::Tensors&)
}
