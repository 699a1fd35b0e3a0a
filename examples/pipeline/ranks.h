#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace pipeline {

/// A rank's place, from the environment variables that torchrun and others set.
struct RankEnvironment {
  int rank = 0;               ///< RANK
  int size = 1;               ///< WORLD_SIZE
  int local = 0;              ///< LOCAL_RANK, the number among the ranks of this machine; RANK if it is not set
  std::string address;        ///< MASTER_ADDR
  std::uint16_t port = 0;     ///< MASTER_PORT
  bool serves_store = false;  ///< rank 0, unless the program that started the ranks does (TORCHELASTIC_USE_AGENT_STORE)
};

/// Not set without RANK: this process is no rank yet.
/// Throws: UsageError that names the variable, for one that is missing or no number in its range.
[[nodiscard]] std::optional<RankEnvironment> rank_environment();

/// The store of all ranks.  Throws: Error with the address, if nothing answers within `limit`.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> connect(const RankEnvironment& place, std::chrono::milliseconds limit);

/// How the ranks ended.
struct RanksEnd {
  int code = 0;  ///< the highest one of a rank that failed, 0 if none did; 128 + N if a second signal N ended them
  std::string failed;  ///< the first rank that failed, and how; empty if none did
};

/// Starts this program `size` times on this machine, as ranks with the arguments of this process, and waits until all have ended.
///
/// This process serves the store. If a rank fails, the others hear of it and end; what still runs after ten seconds is killed. The first
/// SIGINT, SIGTERM or SIGHUP goes to rank 0, which ends all at the same step; the next one goes to all.
/// An exit code above 128 is no failure: a signal asked for the end.
/// Call it before LibTorch has threads: they would take the signals.
/// Throws: Error if a process cannot be started; those that were started are ended.
[[nodiscard]] RanksEnd run_ranks(int size);

}  // namespace pipeline
