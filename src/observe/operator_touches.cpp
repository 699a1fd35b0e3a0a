#include "observe/operator_touches.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>

namespace sidestream {
namespace {

/// Operators that copy one tensor into another, maybe of another device. Nested ones do the work of all others (`to`, `cpu`).
constexpr std::array<std::string_view, 5> copies{"aten::copy_", "aten::_copy_from", "aten::_to_copy", "aten::to",
                                                 "aten::copy"};

/// Operators that give the host a value. Others without a tensor as result ask for shapes, types or a way to compute.
constexpr std::array<std::string_view, 4> values{"aten::_local_scalar_dense", "aten::item", "aten::equal",
                                                 "aten::is_nonzero"};

/// Operators that take the shape of a tensor and read none of its bytes.
constexpr std::array<std::string_view, 11> like{"aten::empty_like", "aten::zeros_like", "aten::ones_like",
                                                "aten::full_like",  "aten::rand_like",  "aten::randn_like",
                                                "aten::new_empty",  "aten::new_zeros",  "aten::new_empty_strided",
                                                "aten::new_ones",   "aten::new_full"};

/// The bytes that a strided tensor spans.
JournalAccess span_of(const at::Tensor& tensor, bool write) {
  const std::size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  return bytes == 0 ? JournalAccess()
                    : JournalAccess{reinterpret_cast<std::uint64_t>(tensor.const_data_ptr()), bytes, write, false};
}

// Not by data(), which throws for a storage that was released.
bool strided(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
}

bool aliases(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage());
}

class TouchSorter {
 public:
  TouchSorter(const OperatorAccess& access, c10::Device device) : access_(access), device_(device) {
    const auto on_device = [&](const at::Tensor& tensor) { return tensor.defined() && tensor.device() == device; };
    for (const c10::ArrayRef<at::Tensor> tensors : {access.reads, access.outputs}) {
      uses_device_ = uses_device_ || std::any_of(tensors.begin(), tensors.end(), on_device);
    }
    copies_ = uses_device_ && std::find(copies.begin(), copies.end(), access.name) != copies.end();
  }

  OperatorTouches sort() {
    if (access_.only_shape) {
      return {};
    }
    bool made = false;
    for (const at::Tensor& output : access_.outputs) {
      const auto is_argument = [&](const at::Tensor& argument) { return aliases(argument, output); };
      if (output.defined() && std::none_of(access_.reads.begin(), access_.reads.end(), is_argument)) {
        touch(output, true);
        made = true;
      }
    }
    if (!made && access_.writes.empty()) {
      // A view, or autograd's own name for one; or a value for the host.
      if (std::find(values.begin(), values.end(), access_.name) == values.end()) {
        return {};
      }
      out_.host_waits = uses_device_;
    }
    const bool reads = std::find(like.begin(), like.end(), access_.name) == like.end();
    for (const at::Tensor& tensor : reads ? access_.reads : c10::ArrayRef<at::Tensor>()) {
      const auto same = [&](const at::Tensor& written) { return written.is_same(tensor); };
      if (std::none_of(access_.writes.begin(), access_.writes.end(), same)) {  // a write stands for the read too
        touch(tensor, false);
      }
    }
    for (const at::Tensor& tensor : access_.writes) {
      touch(tensor, true);
    }
    return std::move(out_);
  }

 private:
  void touch(const at::Tensor& tensor, bool write) {
    if (!strided(tensor)) {
      return;
    }
    JournalAccess span = span_of(tensor, write);
    if (tensor.device() == device_) {
      out_.by_stream.push_back(span);
      return;
    }
    if (!tensor.device().is_cpu() || tensor.unsafeGetTensorImpl()->is_wrapped_number() || span.bytes == 0) {
      return;
    }
    span.pinned = at::globalContext().isPinnedPtr(tensor.const_data_ptr(), device_.type());
    // A copy that may go on after its return needs pinned memory; each other one ends, or has taken its bytes, by then.
    if (copies_ && span.pinned && access_.non_blocking) {
      out_.kind = write ? JournalKind::copy_to_host : JournalKind::copy_to_device;
      out_.by_stream.push_back(span);
      out_.pinned.push_back(tensor);
      return;
    }
    out_.host_waits = out_.host_waits || (write && uses_device_);
    if (!span.pinned) {
      return;
    }
    if (write && uses_device_) {
      out_.kind = copies_ ? JournalKind::copy_to_host : out_.kind;
      out_.by_stream.push_back(span);
    } else {
      out_.by_host.push_back(span);
    }
  }

  const OperatorAccess& access_;
  c10::Device device_;
  bool uses_device_ = false;
  bool copies_ = false;
  OperatorTouches out_;
};

}  // namespace

OperatorTouches touches_of(const OperatorAccess& access, c10::Device device) {
  return TouchSorter(access, device).sort();
}

}  // namespace sidestream
