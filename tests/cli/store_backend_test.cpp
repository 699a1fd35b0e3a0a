#include "examples/pipeline/store_backend.h"

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tests/cli/scratch_folder.h"

namespace sidestream::cli {
namespace {

using pipeline::StoreBackend;
using Store = c10::intrusive_ptr<c10d::Store>;
using Tensors = std::vector<at::Tensor>;
constexpr std::chrono::milliseconds kLimit{20000};

Store tcp_store() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

c10::intrusive_ptr<StoreBackend> backend(const Store& store, int rank, int size,
                                         std::chrono::milliseconds limit = kLimit) {
  return c10::make_intrusive<StoreBackend>(store->clone(), rank, size, limit);
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

class StoreBackendTest : public testing::TestWithParam<bool> {
 protected:
  [[nodiscard]] Store store() const {
    if (GetParam()) {
      return tcp_store();
    }
    return c10::make_intrusive<c10d::FileStore>((folder_.path() / "store").string(), 2);
  }

 private:
  ScratchFolder folder_;
};

TEST_P(StoreBackendTest, MessagesArriveInOrderAndLeaveNoKey) {
  const Store all = store();
  const auto first = backend(all, 0, 2);
  const auto second = backend(all, 1, 2);
  const std::int64_t keys = all->getNumKeys();
  Tensors one{at::arange(3 << 20)};  // 24 MiB: more than TCPStore takes in a value
  Tensors two{-one.front(), at::zeros({0})};
  first->send(one, 1, 7)->wait();
  first->send(two, 1, 7)->wait();
  Tensors got_one{at::zeros_like(one.front())};
  Tensors got_two{at::zeros_like(one.front()), at::zeros({0})};
  second->recv(got_one, 0, 7)->wait();
  second->recv(got_two, 0, 7)->wait();
  EXPECT_TRUE(at::equal(got_one.front(), one.front()));
  EXPECT_TRUE(at::equal(got_two.front(), two.front()));
  EXPECT_EQ(all->getNumKeys(), keys);
}

TEST_P(StoreBackendTest, AllRanksGetTheSumAndTheRootsTensor) {
  const Store all = store();
  std::vector<std::thread> threads;
  std::vector<Tensors> sums(3);
  std::vector<Tensors> copies(3);
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank, ranks = backend(all, rank, 3)] {
      sums[rank] = {at::full({5}, 1 << rank)};
      ranks->allreduce(sums[rank], {})->wait();
      copies[rank] = {at::full({5}, rank)};
      c10d::BroadcastOptions options;
      options.rootRank = 2;
      ranks->broadcast(copies[rank], options)->wait();
      ranks->barrier({})->wait();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(at::equal(sums[rank].front(), at::full({5}, 7)));
    EXPECT_TRUE(at::equal(copies[rank].front(), at::full({5}, 2)));
  }
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreBackendTest, testing::Bool(), [](const testing::TestParamInfo<bool>& info) {
  return info.param ? std::string("Tcp") : std::string("File");
});

TEST(StoreBackend, TensorsOfAnotherSizeAreRefused) {
  const Store all = tcp_store();
  Tensors sent{at::zeros({4})};
  backend(all, 0, 2)->send(sent, 1, 0);
  Tensors received{at::zeros({5})};
  const std::string error = error_of([&] { backend(all, 1, 2)->recv(received, 0, 0); });
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "rank 1 expects 20 bytes in message 0>1:0/0 of rank 0, but got 16", error);
}

TEST(StoreBackend, AFailureEndsAllReceivesWithTheFirstReason) {
  const Store all = tcp_store();
  backend(all, 0, 2)->fail("rank 0 failed: out of memory");
  backend(all, 0, 2)->fail("rank 0 failed: another reason");
  Tensors received{at::zeros({5})};
  EXPECT_EQ(error_of([&] { backend(all, 1, 2)->recv(received, 0, 0); }), "rank 0 failed: out of memory");
}

TEST(StoreBackend, TheTimeLimitNamesTheRankThatTheOthersWaitFor) {
  const Store all = tcp_store();
  std::string errors[2];
  std::vector<std::thread> threads;
  for (const int rank : {0, 1}) {  // 0 waits for 1, and 1 for 2, which sends nothing
    threads.emplace_back([&, rank, ranks = backend(all, rank, 3, std::chrono::milliseconds(rank == 0 ? 2000 : 60000))] {
      Tensors received{at::zeros({5})};
      errors[rank] = error_of([&] { ranks->recv(received, rank + 1, 0); });
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::string& error : errors) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "rank 2 has sent nothing for 2 s", error);
  }
}

TEST(StoreBackend, ARankThatDoesNotTakeItsMessageIsNamed) {
  const Store all = tcp_store();
  std::thread stuck([&] {  // waited for rank 1, and was stopped before the message came
    Tensors received{at::zeros({5})};
    (void)error_of([&] { backend(all, 0, 2, std::chrono::milliseconds(1))->recv(received, 1, 0); });
  });
  stuck.join();
  all->deleteKey("failure");
  Tensors message{at::zeros({5})};
  const auto second = backend(all, 1, 2, std::chrono::milliseconds(1));
  second->send(message, 0, 0);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "rank 0 has sent nothing", error_of([&] { second->recv(message, 0, 0); }));
}

}  // namespace
}  // namespace sidestream::cli
