#pragma once
#include <atomic>
#include <thread>
#include <vector>

namespace sidestream::test {

/// Runs `work(0)` to `work(threads - 1)` on a thread each, let go together. What it throws ends the program.
template <class Work>
void at_once(int threads, const Work& work) {
  std::atomic<int> missing = threads;
  std::vector<std::thread> running;
  for (int number = 0; number < threads; ++number) {
    running.emplace_back([&missing, &work, number] {
      // Relaxed: the start itself must order nothing between the threads, or a sanitizer would miss races.
      missing.fetch_sub(1, std::memory_order_relaxed);
      while (missing.load(std::memory_order_relaxed) > 0) {
        std::this_thread::yield();
      }
      work(number);
    });
  }
  for (std::thread& thread : running) {
    thread.join();
  }
}

}  // namespace sidestream::test
