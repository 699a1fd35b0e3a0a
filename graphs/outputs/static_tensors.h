#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include "graphs/guards/call_spec.h"
#include "graphs/outputs/output_storage.h"
#include "memory/storage_view.h"
#include "offload/version_stamp.h"
#include "sidestream/detail/argument_parts.h"

namespace sidestream {

/// A set of a call's outputs; those from the 64th on share one bit.
using OutputSet = std::uint64_t;

inline constexpr OutputSet all_outputs = ~OutputSet{0};

[[nodiscard]] constexpr OutputSet output_bit(std::size_t output) noexcept {
  return OutputSet{1} << (output < 63 ? output : 63);
}

/// Where the forward graph reads one argument, and where the backward graph leaves that argument's gradient.
/// Members with "replay" are set by each replay; all others by the capture.
struct StaticInput {
  at::Tensor tensor;         ///< owned, or the linked output; the memory of a linked output may be the pool's again
  bool in_pool = false;      ///< `tensor` is memory of the pool, from the forward's graph to the backward's
  std::optional<Link> from;  ///< the output that the input is linked to
  bool requires_grad = false;
  bool same_as_earlier = false;     ///< the same tensor as an earlier argument, which gets the whole gradient
  bool saved = false;               ///< operators saved it for backward
  VersionStamp version;             ///< replay, of a linked and saved input: its version at the latest forward
  OutputSet outputs = all_outputs;  ///< the outputs that lead to it in autograd's graph
  at::Tensor grad;                  ///< static, does not own its memory; undefined if the input gets no gradient
  bool grad_is_seed = false;        ///< `grad` is the seed of the linked output: no copy, if it goes there alone
  bool grad_direct = false;         ///< replay: this time the gradient goes to the linked call's node and nowhere else
  std::optional<OutputStorage> memory = {};  ///< of a gradient that may be given out without a copy
  StorageView view = {};                     ///< of `memory`
  bool goes_to_leaf = false;  ///< replay: `memory` is given out, to a leaf that accumulates on the same stream
};

/// Where the forward graph leaves one result, and where the backward graph reads that result's gradient.
/// Members with "replay" are set by each replay; all others by the capture.
struct StaticOutput {
  /// Whose memory it is. Replays write only memory that the capture made. All other outputs are given out as plain training would.
  enum class Kind : std::uint8_t {
    none,            ///< undefined
    made,            ///< a view of output storage `of`
    earlier_output,  ///< the same tensor as output `of`
    input,           ///< the same tensor as input `of`
    view_of_input,
    other,  ///< `owner`: a parameter, a buffer
    view_of_other,
  };
  at::Tensor tensor;  ///< detached; undefined if the call gave none
  Kind kind = Kind::none;
  std::size_t of = 0;
  StorageView view;                     ///< of a made output
  std::size_t shares_version_with = 0;  ///< of a made output: the first output of its storage, which may be itself
  at::Tensor owner;
  bool detached = false;          ///< of an input or `owner`: given out as another tensor, without gradient
  bool saved = false;             ///< operators saved it for backward
  bool overlaps = false;          ///< with another made output: a change in place would change that output's gradient
  bool requires_grad = false;     ///< backward begins from it
  std::vector<Link> readers;      ///< the inputs that are linked to it
  at::Tensor seed;                ///< the static gradient that backward begins from; undefined if none is required
  std::optional<Link> seed_from;  ///< the input whose gradient `seed` is: memory of the pool
  bool seed_in_pool = false;      ///< `seed` is memory of the pool, in the backward's graph alone
  VersionStamp version;           ///< replay, of a saved or overlapping output: its version at the latest forward
};

/// Before a replay of the call `name`. Throws: UsageError if an output is a view of an input whose strides differ from the capture's.
void check_views_of_inputs(const std::string& name, const std::vector<StaticOutput>& outputs,
                           const std::vector<StaticInput>& held, c10::ArrayRef<at::Tensor> inputs);

/// Appends to `given` the outputs of the replay that was just launched, as tensors of their own. Outputs that share a storage share a
/// version counter. Autograd does not know outputs in `StaticOutput::Kind::made` yet.
/// `storages`: the memory of made outputs. `held`: the static inputs; `inputs`: what the replay was given.
void give_outputs(const std::vector<StaticOutput>& outputs, std::vector<OutputStorage>& storages,
                  const std::vector<StaticInput>& held, c10::ArrayRef<at::Tensor> inputs, c10::Stream current,
                  detail::TensorBuffer& given);

}  // namespace sidestream
