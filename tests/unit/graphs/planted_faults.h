#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/forwarding_runtime.h"

namespace sidestream::testing_model {

/// What an event stands for, told by what its stream was given last when it was recorded.
enum class Mark : std::uint8_t {
  any,
  work,         ///< whatever the stream holds: a fork
  to_host,      ///< copies to the host
  to_device,    ///< copies to the device
  all_to_host,  ///< recorded once more behind them
  all_to_device,
  launch,  ///< a graph
  ready,   ///< external events of graphs
  forward_done,
  backward_done,
  weights_done,
};

/// Which stream a call is for: the caller's current one, one of eager copies, or another.
enum class StreamRole : std::uint8_t { any, current, copies, other };

/// One rule of the engine's ordering taken out: calls of one kind are left out, moved or redirected.
struct Fault {
  enum class Act : std::uint8_t {
    none,
    drop_wait,
    drop_record,             ///< who waits gets what the event stood for before
    record_first,            ///< copies and launches are issued behind the record that should stand behind them
    launch_elsewhere,        ///< every other launch goes to a further side stream
    skip_synchronize,        ///< the host does not wait
    ready_at_capture_begin,  ///< a group's ready event is recorded before the graph's compute
    done_at_capture_begin,   ///< the done event is
    drop_hold,               ///< the allocator is not told which streams use memory that is let go
  };
  Act act = Act::none;
  std::string_view phase = "*";       ///< of Site; "" for outside of any, "*" for all
  StreamRole role = StreamRole::any;  ///< of the stream that waits, records or copies
  Mark mark = Mark::any;
  int nth = 0;                   ///< from this one of like calls in a row; 0: all
  bool captured = false;         ///< the calls are captured, as branches of a graph
  std::string_view begun = "*";  ///< the phase in which the copies that the event stands for were begun; "*" for all
  bool of_another = false;  ///< only waits at the site of another call than the one that the event was recorded for

  /// True where the fault changes what a capture holds.
  [[nodiscard]] bool in_capture() const;
  /// True where it is there before the first replay.
  [[nodiscard]] bool at_capture() const { return in_capture() || captured || act == Act::skip_synchronize; }
};

/// Plants one fault. What is refused at a capture, because its events do not stand for all they should, passes under it, as the
/// nodes that it shows are all connected.
class PlantedRuntime final : public ForwardingRuntime {
 public:
  PlantedRuntime(std::shared_ptr<Runtime> inner, Fault fault);
  ~PlantedRuntime() override;

  /// Faults of replays and eager work are there while it is armed; those of captures always.
  void arm(bool armed) { armed_ = armed; }
  /// Shows the captured nodes as they are.
  void show_nodes() { blind_ = false; }
  /// How many calls were changed.
  [[nodiscard]] std::int64_t changed() const { return changed_; }

  void synchronize_device() override;
  void record(const Event& event, c10::Stream stream) override;
  void wait(c10::Stream stream, const Event& event) override;
  void record(const ExternalEvent& event, c10::Stream stream) override;
  void wait(c10::Stream stream, const ExternalEvent& event) override;
  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override;
  void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) override;
  void begin_capture(c10::Stream stream, const MemoryPool& pool, c10::ArrayRef<at::Generator> generators) override;
  [[nodiscard]] Graph end_capture(c10::Stream stream) override;
  void abandon_capture(c10::Stream stream) noexcept override;
  void launch(const Graph& graph, c10::Stream stream) override;
  [[nodiscard]] std::vector<GraphNode> nodes(const Graph& graph) const override;

 private:
  class SilentGuard;
  struct Copy {
    bool to_host;
    void* to;
    const void* from;
    std::size_t bytes;
  };
  /// What a stream was given last.
  struct Given {
    Mark last = Mark::work;
    int waits = 0;           ///< for forks, since
    bool copies = false;     ///< eager ones, ever
    std::string_view begun;  ///< the phase of its latest wait: copies to the device come after it
    std::vector<Copy> held_copies;
    const Graph* held_launch = nullptr;
  };
  struct Recorded {
    Mark mark = Mark::work;
    int waiters = 0;
    std::string_view begun = {};
    std::string_view of = {};  ///< the call
  };

  [[nodiscard]] bool meant(Fault::Act act, c10::Stream stream, Mark mark, int nth, std::string_view begun = {},
                           bool of_another = false);
  void copy(const Copy& copy, c10::Stream stream);
  void issue(const Copy& copy, c10::Stream stream);
  template <class AnyEvent>
  void follow_elsewhere(c10::Stream stream, const AnyEvent& event);
  [[nodiscard]] bool record_at_begin(Fault::Act act, const ExternalEvent& event, c10::Stream stream, int nth);
  void issue_held(Given& given, c10::Stream stream);

  Fault fault_;
  bool armed_ = false;
  bool blind_ = true;
  std::int64_t changed_ = 0;
  int synchronized_ = 0;
  std::unordered_map<c10::StreamId, Given> streams_;
  std::unordered_map<const void*, Recorded> events_;
  OwnedStream spare_;
  Event spare_event_;
  std::unique_ptr<SilentGuard> guard_;
  // The open capture.
  bool capturing_ = false;
  std::optional<c10::Stream> capture_;
  bool done_recorded_ = false;
  Event begin_;
  std::vector<std::pair<c10::Stream, const Event*>> late_joins_;
  bool joined_late_ = false;  ///< some capture's copies
  // Launches.
  int launches_ = 0;
};

}  // namespace sidestream::testing_model
