#include "sim/torch/copies.h"

#include <ATen/ops/clone.h>
#include <sidestream/error.h>

#include <cstring>
#include <vector>

#include "runtime/host_waits.h"
#include "sim/device/device.h"
#include "sim/torch/aliases.h"
#include "sim/torch/cpu_allocator.h"
#include "sim/torch/device_guard.h"
#include "sim/torch/issued_kernel.h"

namespace sidestream::sim {
namespace {

void copy_kernel(const c10::OperatorHandle& /*op*/, torch::jit::Stack& stack) {
  stack[1].toTensor().copy_(stack[0].toTensor());
}

const c10::OperatorHandle& copy_operator() {
  static const auto* const op =
      new c10::OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow("aten::_copy_from", ""));
  return *op;
}

bool pinned(const at::Tensor& host) {
  const Access bytes = extent(host, false);
  return bytes.bytes == 0 || Device::get().pinned(bytes.begin, bytes.bytes);
}

void check_host_side(const at::Tensor& tensor) {
  if (!is_sim(tensor) && !tensor.device().is_cpu()) {
    throw UsageError("copy_: tensors on sim and on " + tensor.device().str() + " in one call; go through the CPU");
  }
}

}  // namespace

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  check_host_side(source);
  check_host_side(destination);
  Device& device = Device::get();
  const c10::StreamId stream = current_stream();
  const bool to_host = !is_sim(destination);
  const bool from_host = !is_sim(source);
  const bool asynchronous = (!to_host && !from_host) || (non_blocking && pinned(to_host ? destination : source));
  // A pageable or blocking copy stops the host until the stream is done, which a capture forbids. To the device the bytes are
  // taken at the call, so that nothing but a capture has to be stopped.
  if (!asynchronous) {  // each of them stops the host on a GPU
    host_waits::tell(kDeviceType,
                     pinned(to_host ? destination : source) ? HostWait::blocking_copy : HostWait::pageable_copy,
                     "aten::_copy_from");
  }
  if (!asynchronous && to_host) {
    device.host_reads(stream, "a blocking copy to host memory");
  } else if (!asynchronous && device.capturing(stream)) {
    device.host_reads(
        stream, "a blocking copy from host memory",
        "cannot be captured: a replay would read that memory again. Make the tensor once on the device, for example as "
        "a buffer of the module, or pass it to the call");
  }
  device.ready(stream);
  const bool kept = device.keeps(stream) && (asynchronous || !to_host);
  const Access written = extent(destination, true);
  if (!to_host && written.bytes > 0 && device.capturing(stream)) {
    device.preserve(written.begin, written.bytes, stream);
  }

  const KernelScope scope;
  Aliases aliases;
  std::vector<Allocation> allocations;
  torch::jit::Stack stack;
  at::Tensor from = source;
  at::Tensor to = destination;
  if (!from_host) {
    from = aliases.of(source);
  } else if (kept) {
    // Pinned bytes are read again by a later run, pageable ones belong to the caller: a later run reads a copy.
    from = asynchronous ? Aliases().of(source) : at::clone(source);
  }
  if (!to_host || kept) {
    to = to_host ? Aliases().of(destination) : aliases.of(destination);
  }
  stack = {from, to};
  {
    const OperatorMemory memory(stream, kept ? &allocations : nullptr);
    copy_kernel(copy_operator(), stack);
  }
  if (!kept) {
    return destination;
  }
  Work work;
  work.kind = to_host ? Work::Kind::copy_to_host : from_host ? Work::Kind::copy_to_device : Work::Kind::compute;
  work.stream = stream;
  work.name = "aten::copy_";
  if (!from_host || asynchronous) {
    work.accesses.push_back(extent(source, false));
  }
  work.accesses.push_back(written);
  for (const Allocation& allocation : allocations) {
    work.accesses.push_back({static_cast<const std::byte*>(allocation.address), allocation.bytes, true});
  }
  std::erase_if(work.accesses, [](const Access& access) { return access.bytes == 0; });
  work.run = IssuedKernel{copy_operator(), &copy_kernel, work.name, std::move(stack), std::move(allocations), {}}
                 .as_function();
  device.issued(std::move(work));
  return destination;
}

void copy_bytes(void* destination, const void* source, std::size_t bytes) {
  Device& device = Device::get();
  const c10::StreamId stream = current_stream();
  device.ready(stream);
  std::memcpy(destination, source, bytes);
  if (device.keeps(stream)) {
    Work work;
    work.stream = stream;
    work.name = "resize_";
    work.accesses = {{static_cast<const std::byte*>(source), bytes, false},
                     {static_cast<const std::byte*>(destination), bytes, true}};
    work.run = [=] { std::memcpy(destination, source, bytes); };
    device.issued(std::move(work));
  }
}

}  // namespace sidestream::sim
