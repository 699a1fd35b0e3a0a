#pragma once
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "observe/external_synchronisation.h"
#include "observe/operator_observer.h"
#include "observe/order_check.h"
#include "observe/queued_uses.h"
#include "runtime/device_listener.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/journal.h"

namespace sidestream {

/// Decorates a runtime: forwards every call, writes it into a journal, and looks for accesses that nothing orders.
///
/// `observe` reports operators, called by an OperatorObserverGuard. Site says where work is issued. ExternalSynchronisation reports
/// streams and events that a model or autograd uses. A wait of the host counts on the thread that began the step, and on threads whose
/// operators are observed. Other threads have an order of their own. The journal grows until `stop`: about 100 bytes an operation. It
/// does not see kernels' own temporaries, or host code that touches pinned memory without an operator. Handles are the inner runtime's.
/// Threads: as Runtime; one lock.
class CheckedRuntime final : public ForwardingRuntime {
 public:
  explicit CheckedRuntime(std::shared_ptr<Runtime> inner);
  ~CheckedRuntime() override;

  /// Reports the accesses of one operator, on the calling thread's current stream or by the host itself. `phase` and `name` say where it
  /// was issued if no Site does; empty: unknown.
  void observe(const OperatorAccess& access, std::string_view phase = {}, std::string_view name = {});
  /// Operations from here on belong to step `step`; 0 outside of any.
  void begin_step(std::uint64_t step);
  /// Writes nothing from here on.
  void stop();

  /// Checks what is new. The findings so far, in words.
  [[nodiscard]] std::vector<std::string> findings();
  /// Operations written down so far.
  [[nodiscard]] std::uint64_t operations() const;
  [[nodiscard]] Journal journal() const;

  void synchronize(c10::Stream stream) override;
  void synchronize_device() override;
  [[nodiscard]] Event create_event(EventTiming timing) override;
  void record(const Event& event, c10::Stream stream) override;
  void wait(c10::Stream stream, const Event& event) override;
  void synchronize(const Event& event) override;
  [[nodiscard]] ExternalEvent create_external_event() override;
  void record(const ExternalEvent& event, c10::Stream stream) override;
  void wait(c10::Stream stream, const ExternalEvent& event) override;
  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override;
  void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) override;
  void begin_capture(c10::Stream stream, const MemoryPool& pool, c10::ArrayRef<at::Generator> generators) override;
  [[nodiscard]] Graph end_capture(c10::Stream stream) override;
  void abandon_capture(c10::Stream stream) noexcept override;
  void launch(const Graph& graph, c10::Stream stream) override;

 private:
  /// The seed and offset of graphs that draw (DrawOrder): one location for all, under an address that represents it.
  [[nodiscard]] static JournalAccess seed_and_offset(bool write);

  friend class ExternalSynchronisation;

  /// An operation before its stream and event have their numbers in the journal.
  struct Noted {
    JournalKind kind;
    StreamKey stream;
    const void* event;  ///< native; null for none
    std::uint32_t name;
    std::uint32_t site;
    std::vector<JournalAccess> accesses;
    bool internal = false;  ///< the event is one of the capture's own
  };
  /// The contents of a capture, with the streams that belong to it.
  struct Captured {
    StreamKey origin = 0;
    std::uint32_t number = 0;
    std::uint32_t site = 0;  ///< where it was begun
    std::vector<StreamKey> streams;
    std::vector<const void*> recorded;  ///< events recorded in it for itself: each graph has its own of them
    std::vector<Noted> operations;
  };

  void note(JournalKind kind, StreamKey stream, const void* event, const char* name,
            std::vector<JournalAccess> accesses = {}) {
    note(kind, stream, event, name, std::move(accesses), site_index());
  }
  void note(JournalKind kind, StreamKey stream, const void* event, const char* name,
            std::vector<JournalAccess> accesses, std::uint32_t site);
  /// No open capture has recorded `event`, whatever had its address before.
  void forget_recorded(const void* event);
  void note_record(const void* event, StreamKey stream);
  void note_wait(StreamKey stream, const void* event);
  void note_free(const QueuedUses::Freed& freed);
  void note_frees();
  void write(const Noted& noted, std::uint32_t stream, std::uint32_t event, std::uint32_t site);
  [[nodiscard]] std::uint32_t name_index(std::string_view name);
  [[nodiscard]] std::uint32_t site_index(std::string_view phase = {}, std::string_view name = {});
  [[nodiscard]] std::uint32_t stream_index(StreamKey stream);
  [[nodiscard]] std::uint32_t fork_index(const Captured& graph, StreamKey stream);
  [[nodiscard]] std::uint32_t event_number(const void* native);
  [[nodiscard]] std::uint32_t new_event(const void* native);
  [[nodiscard]] Captured* capture_of(StreamKey stream);
  [[nodiscard]] Captured* capture_that_recorded(const void* event);
  std::unique_ptr<Captured> take_capture(StreamKey stream);

  mutable std::mutex mutex_;
  Journal journal_;
  OrderChecker checker_;
  std::vector<std::string> texts_;
  bool stopped_ = false;
  std::uint64_t step_ = 0;
  std::thread::id host_ = std::this_thread::get_id();
  QueuedUses uses_;
  std::unordered_map<std::string, std::uint32_t> names_;
  std::unordered_map<std::uint64_t, std::uint32_t> sites_;  ///< of this step, by phase and name
  std::unordered_map<StreamKey, std::uint32_t> streams_;
  std::unordered_map<std::uint64_t, std::uint32_t> forks_;  ///< by graph number and stream
  std::unordered_map<const void*, std::uint32_t> events_;
  std::unordered_map<std::uint64_t, std::uint32_t> inner_events_;  ///< by graph number and native event
  std::uint32_t next_event_ = 1;
  std::uint32_t graphs_made_ = 0;
  std::vector<std::unique_ptr<Captured>> open_;
  std::unordered_map<const void*, std::unique_ptr<Captured>> graphs_;
  ExternalSynchronisation external_{*this};
  ListeningGuard listening_;  ///< last: what it calls must be there
};

}  // namespace sidestream
