#include "models/scopes.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/StreamGuard.h>

#include "sidestream/scope.h"

namespace sidestream::testing_model {

at::Tensor through_scopes(at::Tensor h, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const OffloadScope scope(name);
    h = h.exp().mul(0.5).tanh();
  }
  return h;
}

at::Tensor TwoStreams::forked_layers(const at::Tensor& x, const std::vector<const char*>& names) const {
  at::Tensor h = x.mul(1.5);
  for (const char* name : names) {
    const at::Tensor given = h;  // alive until the streams meet again: the branch reads it
    at::Tensor other;
    {
      const OffloadScope scope(name);
      fork(main, branch);
      {
        const c10::StreamGuard on_branch(branch);
        other = h.exp().mul(0.1).tanh();
      }
      h = h.sigmoid();
    }
    {
      const OffloadScope scope("between");
      h = h.mul(0.9);
      h = h.mul(1.1).tanh();  // on memory that the scope above may have let go
    }
    join(branch, main);
    h = h + other;
  }
  return h;
}

at::Tensor TwoStreams::saved_on_both(const at::Tensor& x) const {
  at::Tensor h = x.mul(1.5);
  for (int layer = 0; layer < 3; ++layer) {
    at::Tensor shared;
    at::Tensor other;
    {
      const OffloadScope scope("maker");
      shared = h.exp();
    }
    fork(main, branch);
    {
      const c10::StreamGuard on_branch(branch);
      const OffloadScope scope("reader");
      other = shared.mul(shared).tanh();
    }
    {
      const OffloadScope scope("beside");
      h = h.mul(0.3).tanh().mul(0.2).tanh();
    }
    shared.reset();
    h = h.mul(0.5).tanh();  // on memory that the scopes above may have let go
    join(branch, main);
    h = (h + other).sigmoid();
  }
  return h;
}

std::pair<at::Tensor, at::Tensor> TwoStreams::read_back_on_both(const at::Tensor& x, const at::Tensor& weight) const {
  at::Tensor p = x.mul(1.5).tanh().mul(0.5).tanh().mul(0.5);
  p.register_hook([](const at::Tensor& grad) {  // takes the memory that main's backward has freed
    std::vector<at::Tensor> taken;
    for (int i = 0; i < 6; ++i) {
      taken.push_back(grad.mul(0.1));
    }
    at::Tensor sum = grad;
    for (const at::Tensor& each : taken) {
      sum = sum + each;
    }
    return sum;
  });
  at::Tensor shared = p.detach().exp();
  {
    const OffloadScope scope("a");
    p = p.mul(shared);
  }
  fork(main, branch);
  at::Tensor other;
  {
    const c10::StreamGuard on_branch(branch);
    const OffloadScope scope("b");
    other = weight.mul(shared);
  }
  // As a model must, for the tensor itself; the copy that comes back is the engine's to care for.
  shared.record_stream(branch);
  shared.reset();
  {
    const OffloadScope scope("more");
    p = p.sigmoid().tanh();
  }
  {
    const OffloadScope scope("last");
    p = p.sigmoid();
  }
  join(branch, main);
  return {p, other};
}

}  // namespace sidestream::testing_model
