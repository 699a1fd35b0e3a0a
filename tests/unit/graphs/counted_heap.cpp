#include "unit/graphs/counted_heap.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::int64_t> allocations{0};
thread_local std::int64_t of_this_thread = 0;

void count() noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  ++of_this_thread;
}

void* counted(std::size_t bytes) {
  count();
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes); memory != nullptr) {
    return memory;
  }
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new[](std::size_t bytes) { return counted(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  count();
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t& tag) noexcept { return operator new(bytes, tag); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*bytes*/) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t /*bytes*/) noexcept { std::free(memory); }

namespace sidestream::testing_model {

std::int64_t heap_allocations() noexcept { return allocations.load(std::memory_order_relaxed); }
std::int64_t heap_allocations_of_this_thread() noexcept { return of_this_thread; }

}  // namespace sidestream::testing_model
