#include "sim/torch/operators.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sidestream/error.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/host_waits.h"
#include "sim/device/device.h"
#include "sim/torch/aliases.h"
#include "sim/torch/cpu_allocator.h"
#include "sim/torch/device_guard.h"
#include "sim/torch/generator.h"
#include "sim/torch/issued_kernel.h"
#include "sim/torch/operator_info.h"
#include "sim/torch/schema_audit.h"

namespace sidestream::sim {
namespace {

using torch::jit::Stack;
using Kind = OperatorInfo::Kind;

/// One call of an operator on its way to the CPU kernel and back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, CpuKernel kernel, Stack& stack)
      : op_(op),
        kernel_(kernel),
        info_(info_of(op)),
        stack_(stack),
        base_(stack.size() - info_.arguments.size()),
        device_(Device::get()),
        stream_(current_stream()) {}

  void run() {
    if (info_.returns_view) {
      throw UsageError(std::string(info_.name) +
                       " makes a view and has no kernel on the sim device; copy the tensor first (clone, contiguous)");
    }
    if (!info_.has_cpu_kernel && kernel_ == &run_cpu_kernel) {
      throw UsageError(std::string(info_.name) +
                       " has no CPU kernel, which the sim device would run; compute it on the CPU or another way");
    }
    if ((info_.host_needs_result && !compares_no_bytes()) || indexes_by_mask()) {
      if (info_.waits_on_devices || !info_.host_needs_result) {
        host_waits::tell(kDeviceType, HostWait::data_dependent, info_.name);
      }
      device_.host_reads(stream_, info_.name);
    }
    device_.ready(stream_);
    if (info_.random) {
      generator_ = generator_given();
    }
    const DrawLock drawing = info_.random ? device_.draw(stream_, generator_) : DrawLock();
    kept_ = device_.keeps(stream_);
    convert_arguments();
    if (device_.capturing(stream_)) {
      for_each_tensor(
          [&](const at::Tensor& tensor, const at::Tensor& /*alias*/, const OperatorInfo::Argument& argument) {
            if (argument.written) {
              const Access bytes = extent(tensor, true);
              if (bytes.bytes > 0) {
                device_.preserve(bytes.begin, bytes.bytes, stream_);
              }
            }
          });
    }
    SchemaAudit audit(info_, stack_, base_);
    Stack results = kept_ ? Stack(cpu_) : std::move(cpu_);
    compute(results);
    audit.compare();
    take_over_resizes();
    return_results(results);
    if (kept_) {
      hand_over();
    }
    stack_.erase(stack_.begin() + static_cast<std::ptrdiff_t>(base_),
                 stack_.begin() + static_cast<std::ptrdiff_t>(base_ + info_.arguments.size()));
  }

 private:
  const c10::IValue& given(std::size_t i) const { return stack_[base_ + i]; }

  // LibTorch, on a GPU too, compares such tensors without a look at their bytes. MultiheadAttention compares its query with its key.
  bool compares_no_bytes() const {
    if (std::string_view(info_.name) != "aten::equal") {
      return false;
    }
    const at::Tensor& a = given(0).toTensor();
    const at::Tensor& b = given(1).toTensor();
    if (a.sizes() != b.sizes() || a.numel() == 0) {
      return true;
    }
    return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.dtype() == b.dtype() &&
           a.strides() == b.strides();
  }

  // An index by a mask is as long as the mask has ones; writing one value through a mask is not.
  bool indexes_by_mask() const {
    for (std::size_t i = 0; i < info_.arguments.size(); ++i) {
      if (info_.arguments[i].kind != Kind::optional_tensor_list || given(i).isNone()) {
        continue;
      }
      if (i + 1 < info_.arguments.size() && given(i + 1).isTensor() && given(i + 1).toTensor().numel() == 1) {
        return false;
      }
      for (const auto& element : given(i).toListRef()) {
        if (element.isTensor() && element.toTensor().defined() &&
            (element.toTensor().scalar_type() == at::kBool || element.toTensor().scalar_type() == at::kByte)) {
          return true;
        }
      }
    }
    return false;
  }

  at::Tensor convert(const at::Tensor& tensor, bool host_tensor_allowed) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.device().type() == kDeviceType) {
      if (tensor.layout() != at::kStrided) {
        throw UsageError(std::string(info_.name) + ": the sim device has strided tensors only");
      }
      return aliases_.of(tensor);
    }
    if (!tensor.device().is_cpu() || (tensor.dim() > 0 && !host_tensor_allowed)) {
      throw UsageError(std::string(info_.name) + ": tensors on sim and on " + tensor.device().str() +
                       " in one call; move them to one device");
    }
    if (tensor.dim() > 0) {  // an index: LibTorch copies it to the device first
      host_waits::tell(kDeviceType, HostWait::pageable_copy, info_.name);
    }
    return kept_ ? host_copy(tensor) : tensor;
  }

  // A kept work reads the value that a host tensor has now, as a kernel's by-value argument does.
  static at::Tensor host_copy(const at::Tensor& tensor) {
    const KernelScope scope;
    at::Tensor copy = at::clone(tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {  // has no dimensions, as an index tensor may have
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return copy;
  }

  void convert_arguments() {
    cpu_.reserve(std::max(info_.arguments.size(), info_.returns.size()));
    for (std::size_t i = 0; i < info_.arguments.size(); ++i) {
      const c10::IValue& value = given(i);
      if (value.isNone() && info_.arguments[i].kind != Kind::generator) {
        cpu_.push_back(value);
        continue;
      }
      switch (info_.arguments[i].kind) {
        case Kind::plain:
          cpu_.push_back(value);
          break;
        case Kind::tensor:
          cpu_.emplace_back(convert(value.toTensor(), false));
          if (info_.arguments[i].may_resize && is_sim(value.toTensor())) {
            outs_.emplace_back(i, cpu_.back().toTensor());
          }
          break;
        case Kind::tensor_list: {
          c10::List<at::Tensor> list;
          for (const auto& element : value.toListRef()) {
            list.push_back(convert(element.toTensor(), false));
          }
          cpu_.emplace_back(std::move(list));
          break;
        }
        case Kind::optional_tensor_list: {
          c10::List<std::optional<at::Tensor>> list;
          for (const auto& element : value.toListRef()) {
            list.push_back(element.isNone() ? std::nullopt
                                            : std::optional<at::Tensor>(convert(element.toTensor(), true)));
          }
          cpu_.emplace_back(std::move(list));
          break;
        }
        case Kind::generator:
          cpu_.emplace_back(cpu_side(generator_));
          generator_argument_ = static_cast<int>(i);
          break;
        case Kind::device:
          cpu_.emplace_back(value.toDevice().type() == kDeviceType ? c10::Device(c10::kCPU) : value.toDevice());
          break;
      }
    }
  }

  at::Generator generator_given() {
    for (std::size_t i = 0; i < info_.arguments.size(); ++i) {
      if (info_.arguments[i].kind != Kind::generator || given(i).isNone()) {
        continue;
      }
      at::Generator generator = given(i).toGenerator();
      if (!is_sim_generator(generator)) {
        throw UsageError(std::string(info_.name) + ": the generator is on " + generator.device().str() +
                         ", the tensors are on sim; make the generator for the sim device");
      }
      return generator;
    }
    return default_generator();
  }

  void compute(Stack& results) {
    const KernelScope scope;
    const OperatorMemory memory(stream_, kept_ ? &allocations_ : nullptr);
    if (!info_.random) {
      kernel_(op_, results);
      return;
    }
    if (generator_argument_ >= 0) {
      if (kept_) {
        first_state_ = state_of(generator_);
      }
      kernel_(op_, results);
      if (kept_) {
        random_draws_ = draws_between(*first_state_, state_of(generator_));
      }
      return;
    }
    GeneratorState state = default_state();
    if (kept_) {
      first_state_ = state;
    }
    {
      const DrawsFrom draws(state, through());
      kernel_(op_, results);
    }
    if (kept_) {
      random_draws_ = draws_between(*first_state_, state);
    }
    set_default_state(state);
  }

  DrawsFrom::Through through() const {
    return generator_argument_ >= 0 || kernel_ != &run_cpu_kernel ? DrawsFrom::Through::argument
                                                                  : DrawsFrom::Through::cpu_default;
  }

  /// Calls `action(given, alias, argument)` for each sim tensor among the arguments. Only where `cpu_` was kept.
  template <typename Action>
  void for_each_tensor(Action action) {
    for (std::size_t i = 0; i < info_.arguments.size(); ++i) {
      const OperatorInfo::Argument& argument = info_.arguments[i];
      if (argument.kind == Kind::tensor && given(i).isTensor() && is_sim(given(i).toTensor())) {
        action(given(i).toTensor(), cpu_[i].toTensor(), argument);
      } else if ((argument.kind == Kind::tensor_list || argument.kind == Kind::optional_tensor_list) &&
                 given(i).isList()) {
        const auto tensors = given(i).toListRef();
        const auto aliases = cpu_[i].toListRef();
        for (std::size_t k = 0; k < tensors.size(); ++k) {
          if (tensors[k].isTensor() && is_sim(tensors[k].toTensor())) {
            action(tensors[k].toTensor(), aliases[k].toTensor(), argument);
          }
        }
      }
    }
  }

  void take_over_resizes() {
    for (const auto& [i, alias] : outs_) {
      const void* grown = aliases_.take_over_resize(given(i).toTensor(), alias);
      if (grown != nullptr) {
        // A later run finds the grown block in place and allocates one less.
        std::erase_if(allocations_, [&](const Allocation& allocation) { return allocation.address == grown; });
      }
    }
  }

  void return_results(Stack& results) {
    for (std::size_t i = 0; i < info_.returns.size(); ++i) {
      if (info_.returns[i] >= 0) {
        stack_.push_back(given(static_cast<std::size_t>(info_.returns[i])));
      } else if (results[i].isTensor()) {
        stack_.emplace_back(aliases_.adopt(results[i].toTensor(), info_.name, kept_));
      } else if (results[i].isTensorList()) {
        c10::List<at::Tensor> list;
        for (const auto& element : results[i].toListRef()) {
          list.push_back(aliases_.adopt(element.toTensor(), info_.name, kept_));
        }
        stack_.emplace_back(std::move(list));
      } else {
        stack_.push_back(std::move(results[i]));
      }
    }
  }

  void hand_over() {
    Work work;
    work.stream = stream_;
    work.name = info_.name;
    work.random_draws = random_draws_;
    work.draws_vary = info_.draws_vary;
    work.generator = generator_;
    for_each_tensor([&](const at::Tensor& tensor, const at::Tensor& /*alias*/, const OperatorInfo::Argument& argument) {
      const Access access = extent(tensor, argument.written);
      if (access.bytes > 0) {
        work.accesses.push_back(access);
      }
    });
    for (const Allocation& allocation : allocations_) {
      work.accesses.push_back({static_cast<const std::byte*>(allocation.address), allocation.bytes, true, true});
    }
    work.run = IssuedKernel{op_,
                            kernel_,
                            info_.name,
                            std::move(cpu_),
                            std::move(allocations_),
                            first_state_,
                            generator_argument_,
                            through(),
                            at::GradMode::is_enabled()}
                   .as_function();
    device_.issued(std::move(work));
  }

  const c10::OperatorHandle& op_;
  CpuKernel kernel_;
  const OperatorInfo& info_;
  Stack& stack_;
  std::size_t base_;
  Device& device_;
  c10::StreamId stream_;
  bool kept_ = false;
  Aliases aliases_;
  Stack cpu_;
  c10::SmallVector<std::pair<std::size_t, at::Tensor>, 2> outs_;
  std::vector<Allocation> allocations_;
  at::Generator generator_;  ///< of a random operator: what it draws from
  int generator_argument_ = -1;
  std::optional<GeneratorState> first_state_;
  std::uint32_t random_draws_ = 0;
};

}  // namespace

void run_cpu_kernel(const c10::OperatorHandle& op, Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

void issue_operator(const c10::OperatorHandle& op, CpuKernel kernel, Stack& stack) { Call(op, kernel, stack).run(); }

void register_operators(torch::Library& all, torch::Library& aten) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->schema().name().compare(0, 6, "aten::") != 0 ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    const bool decomposes = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    if (decomposes && !info_of(*op).returns_view) {
      aten.impl(c10::toString(name).c_str(), boxed_kernel<&run_cpu_kernel>());
    }
  }
  all.fallback(boxed_kernel<&run_cpu_kernel>());
}

}  // namespace sidestream::sim
