#include "store_backend.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

namespace pipeline {
namespace {

constexpr std::size_t kPart = std::size_t{4} << 20;      // TCPStore takes 8 MiB in one value
constexpr std::chrono::milliseconds kBetweenLooks{500};  // for a failure of another rank
constexpr std::chrono::microseconds kShortest{20};
constexpr std::chrono::milliseconds kLongest{10};
constexpr int kCollective = -1;  // the tag of broadcast, allreduce and barrier
constexpr const char* kFailure = "failure";

/// Already done when it is made.
class DoneWork final : public c10d::Work {
 public:
  explicit DoneWork(const std::vector<at::Tensor>& tensors)
      : future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(tensors));
    finish();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

c10::intrusive_ptr<c10d::Work> done(const std::vector<at::Tensor>& tensors) {
  return c10::make_intrusive<DoneWork>(tensors);
}

[[noreturn]] void throw_store_ended() {
  C10_THROW_ERROR(DistBackendError,
                  "rank 0, or the program that started the ranks, has ended: the store does not answer any more");
}

std::string waiting_key(int rank) { return "waiting/" + std::to_string(rank); }
std::string part_key(const std::string& key, std::size_t first) {
  return first == 0 ? key : key + "/" + std::to_string(first / kPart);
}

}  // namespace

StoreBackend::StoreBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds limit)
    : Backend(rank, size), store_(std::move(store)), limit_(limit) {}

std::string StoreBackend::next_key(Messages& messages, int from, int to, int tag) {
  const std::string pair = std::to_string(from) + ">" + std::to_string(to) + ":" + std::to_string(tag);
  return pair + "/" + std::to_string(messages[pair]++);
}

void StoreBackend::put(const at::Tensor& tensor, int to, int tag) try {
  const at::Tensor host = tensor.detach().to(at::kCPU).contiguous();
  const auto* bytes = static_cast<const std::uint8_t*>(host.const_data_ptr());
  const std::string key = next_key(sent_, getRank(), to, tag);
  // The first part is written last: its key says that the message is there.
  for (std::size_t parts = std::max<std::size_t>((host.nbytes() + kPart - 1) / kPart, 1); parts-- > 0;) {
    const std::size_t first = parts * kPart;
    store_->set(part_key(key, first),
                std::vector<std::uint8_t>(bytes + first, bytes + std::min(first + kPart, host.nbytes())));
  }
} catch (const c10::DistNetworkError&) {
  throw_store_ended();
}

void StoreBackend::take(at::Tensor& tensor, int from, int tag) try {
  at::Tensor host = at::empty_like(tensor, tensor.options().device(at::kCPU), at::MemoryFormat::Contiguous);
  auto* bytes = static_cast<std::uint8_t*>(host.mutable_data_ptr());
  const std::string key = next_key(received_, from, getRank(), tag);
  wait_for(key, from);
  for (std::size_t first = 0; first == 0 || first < host.nbytes(); first += kPart) {
    const std::vector<std::uint8_t> part = store_->get(part_key(key, first));
    TORCH_CHECK_WITH(DistBackendError, part.size() == std::min(kPart, host.nbytes() - first), "rank ", getRank(),
                     " expects ", host.nbytes(), " bytes in message ", key, " of rank ", from, ", but got ",
                     first + part.size(), "; both ranks must pass tensors of one shape and dtype");
    std::copy(part.begin(), part.end(), bytes + first);
    store_->deleteKey(part_key(key, first));
  }
  tensor.detach().copy_(host);
} catch (const c10::DistNetworkError&) {
  throw_store_ended();
}

void StoreBackend::wait_for(const std::string& key, int from) {
  const auto begin = std::chrono::steady_clock::now();
  auto looked = begin;
  bool told = false;
  // Not Store::wait: c10d logs a warning for each wait that runs out of time.
  while (!is_there(key)) {
    const auto now = std::chrono::steady_clock::now();
    if (now - looked > kBetweenLooks || now - begin > limit_) {
      looked = now;
      TORCH_CHECK_WITH(DistBackendError, !is_there(kFailure), store_->get_to_str(kFailure));
      if (!told) {
        store_->set(waiting_key(getRank()), std::to_string(from) + " " + key);
        told = true;
      }
    }
    if (now - begin > limit_) {
      const std::string reason =
          c10::str("rank ", silent_rank(from), " has sent nothing for ", limit_.count() / 1000.0,
                   " s; it was not started, it has ended, or it computes for longer than the time limit");
      fail(reason);
      C10_THROW_ERROR(DistBackendError, reason);
    }
    std::this_thread::sleep_for(std::clamp<std::chrono::nanoseconds>((now - begin) / 8, kShortest, kLongest));
  }
  if (told) {
    store_->deleteKey(waiting_key(getRank()));
  }
}

bool StoreBackend::is_there(const std::string& key) {
  try {
    return store_->check({key});
  } catch (const c10::DistNetworkError&) {
    throw_store_ended();
  }
}

int StoreBackend::silent_rank(int rank) {
  for (int i = 0; i < getSize() && is_there(waiting_key(rank)); ++i) {
    const std::string waits = store_->get_to_str(waiting_key(rank));
    const std::size_t space = waits.find(' ');
    if (is_there(waits.substr(space + 1))) {
      break;  // its message is there, but it does not take it
    }
    rank = std::stoi(waits.substr(0, space));
  }
  return rank;
}

c10::intrusive_ptr<c10d::Work> StoreBackend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  for (const at::Tensor& tensor : tensors) {
    put(tensor, to, tag);
  }
  return done(tensors);
}

c10::intrusive_ptr<c10d::Work> StoreBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  for (at::Tensor& tensor : tensors) {
    take(tensor, from, tag);
  }
  return done(tensors);
}

c10::intrusive_ptr<c10d::Work> StoreBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                       const c10d::BroadcastOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  if (getRank() != root) {
    return recv(tensors, root, kCollective);
  }
  for (int to = 0; to < getSize(); ++to) {
    if (to != root) {
      send(tensors, to, kCollective);
    }
  }
  return done(tensors);
}

c10::intrusive_ptr<c10d::Work> StoreBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                       const c10d::AllreduceOptions& options) {
  TORCH_CHECK_WITH(DistBackendError, options.reduceOp == c10d::ReduceOp::SUM, "the store backend sums only");
  for (at::Tensor& tensor : tensors) {
    const at::Tensor own = tensor.detach().to(at::kCPU);
    for (int to = 0; to < getSize(); ++to) {
      if (to != getRank()) {
        put(own, to, kCollective);
      }
    }
    std::optional<at::Tensor> sum;
    for (int from = 0; from < getSize(); ++from) {
      at::Tensor part = from == getRank() ? own : at::empty_like(own);
      if (from != getRank()) {
        take(part, from, kCollective);
      }
      sum = sum ? *sum + part : part;
    }
    tensor.detach().copy_(*sum);
  }
  return done(tensors);
}

c10::intrusive_ptr<c10d::Work> StoreBackend::barrier(const c10d::BarrierOptions& /*options*/) {
  std::vector<at::Tensor> none{at::zeros({1})};
  return allreduce(none, {});
}

void StoreBackend::fail(const std::string& reason, bool serves_store) noexcept {
  try {
    (void)store_->compareSet(kFailure, std::string(), reason);
    if (serves_store) {
      std::this_thread::sleep_for(4 * kBetweenLooks);
    }
  } catch (const std::exception&) {  // the store is gone, and so the other ranks hear of it
  }
}

void StoreBackend::leave(bool serves_store) {
  const auto left = [](int rank) { return "left/" + std::to_string(rank); };
  if (!serves_store) {
    return store_->set(left(getRank()), std::string("1"));
  }
  for (int rank = 0; rank < getSize(); ++rank) {
    if (rank != getRank()) {
      wait_for(left(rank), rank);
    }
  }
}

}  // namespace pipeline
