#pragma once
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "unit/graphs/rank_pipeline.h"

namespace sidestream::testing_model {

enum class RankSchedule : std::uint8_t { one_forward_one_backward, forwards_first, zero_bubble };
enum class RankExtra : std::uint8_t {
  none,
  forwards_alone,  ///< chunks without a backward, first and in between
  hybrid,          ///< some layers are not graphed, and some have no group
  cut,  ///< layers are detached from each other; one chunk's forward runs between another's backward, layer by layer
  alternating,       ///< the layers of two chunks alternate in forward
  overtaking,        ///< one chunk runs between the layers of another in forward
  random,            ///< any order in which each chunk's forward comes before its backward, by layers in forward
  random_cut,        ///< by layers in backward too
  random_whole,      ///< any such order, but each forward and each backward runs at once
  random_whole_cut,  ///< forwards run between the layers of backwards
};

/// What one rank of a pipeline runs.
struct RankProgram {
  std::string name;
  RankPlace place;
  std::size_t layers = 1;                 ///< of each part
  std::vector<std::size_t> microbatches;  ///< by step
  RankSchedule schedule = RankSchedule::one_forward_one_backward;
  RankExtra extra = RankExtra::none;
  std::size_t seed = 0;

  [[nodiscard]] bool is_random() const { return extra >= RankExtra::random; }
  [[nodiscard]] bool cut() const {
    return extra == RankExtra::cut || extra == RankExtra::random_cut || extra == RankExtra::random_whole_cut;
  }
  [[nodiscard]] RankOrder order(std::size_t step) const;
};

inline std::ostream& operator<<(std::ostream& out, const RankProgram& program) { return out << program.name; }

[[nodiscard]] std::vector<RankProgram> rank_programs();
[[nodiscard]] std::vector<RankProgram> random_programs();
/// Those of `programs` that callables in order can take: the layers of two chunks do not alternate in forward, and with delayed weight
/// gradients no other chunk runs between the layers of a backward.
[[nodiscard]] std::vector<RankProgram> for_callables(std::vector<RankProgram> programs);
/// For callables in order: layers of two forwards do not take turns, nor do those of two backwards.
[[nodiscard]] std::vector<RankProgram> random_callable_programs();
/// Detached layers of one chunk, as many as are needed so that some of them are offloaded.
[[nodiscard]] std::vector<RankProgram> deep_programs();
/// Every rank of 1 to 4, with 1 to 3 parts and 1 to 12 microbatches, one of them fewer in the last step if no gradients are delayed.
[[nodiscard]] std::vector<RankProgram> every_order(RankSchedule schedule);

}  // namespace sidestream::testing_model
