#include "unit/graphs/rank_programs.h"

#include <algorithm>
#include <random>

namespace sidestream::testing_model {
namespace {

/// `first` and `second` run layer by layer, in turn; the layers of a backward go down.
RankOrder layers_in_turn(const RankWork& first, const RankWork& second, std::size_t layers) {
  RankOrder order;
  for (std::size_t l = 0; l < layers; ++l) {
    for (RankWork work : {first, second}) {
      work.layer = work.kind == RankWork::Kind::backward ? layers - 1 - l : l;
      order.push_back(work);
    }
  }
  return order;
}

/// Chunks of `place` in a random order: each runs its forward, then its backward, at once or by layers, then its weight gradients, if
/// they are delayed. Those of a part come in the order of its backwards, since sums of gradients depend on it.
RankOrder random_order(const RankProgram& program, std::size_t microbatches) {
  using Kind = RankWork::Kind;
  const RankPlace& place = program.place;
  const RankExtra extra = program.extra;
  const std::size_t layers = program.layers;
  const bool forward_by_layers = extra == RankExtra::random || extra == RankExtra::random_cut;
  const bool backward_by_layers = extra == RankExtra::random_cut || extra == RankExtra::random_whole_cut;
  std::minstd_rand random(static_cast<unsigned>(program.seed + 1));
  std::vector<RankOrder> left;
  for (std::size_t m = 0; m < microbatches; ++m) {
    for (std::size_t p = 0; p < place.parts; ++p) {
      RankOrder& chunk = left.emplace_back();
      for (std::size_t l = 0; l < layers && forward_by_layers; ++l) {
        chunk.push_back({Kind::forward, p, m, l});
      }
      if (!forward_by_layers) {
        chunk.push_back({Kind::forward, p, m});
      }
      for (std::size_t l = layers; l-- > 0 && backward_by_layers;) {
        chunk.push_back({Kind::backward, p, m, l});
      }
      if (!backward_by_layers) {
        chunk.push_back({Kind::backward, p, m});
      }
      if (program.schedule == RankSchedule::zero_bubble) {
        chunk.push_back({Kind::weights, p, m});
      }
    }
  }
  RankOrder order;
  const auto amid_backward = [&](const RankOrder& chunk) {
    const RankWork& next = chunk.front();
    return next.kind == Kind::backward && next.layer != RankWork::kAll && next.layer + 1 != layers;
  };
  const auto place_of_backward = [&](const RankOrder& chunk) {
    return std::find_if(order.begin(), order.end(), [&](const RankWork& work) {
      return work.kind == Kind::backward && work.part == chunk.front().part &&
             work.microbatch == chunk.front().microbatch;
    });
  };
  while (!left.empty()) {
    const std::size_t open = std::min<std::size_t>(left.size(), 4);
    auto chunk = left.begin() + static_cast<std::ptrdiff_t>(random() % open);
    if (!forward_by_layers && chunk->front().kind == Kind::backward) {  // nor do the layers of two backwards take turns
      const auto begun = std::find_if(left.begin(), left.end(), amid_backward);
      chunk = begun == left.end() ? chunk : begun;
    }
    if (chunk->front().kind == Kind::weights) {
      const std::size_t part = chunk->front().part;
      for (auto other = left.begin(); other != left.end(); ++other) {
        if (other->front().kind == Kind::weights && other->front().part == part &&
            place_of_backward(*other) < place_of_backward(*chunk)) {
          chunk = other;
        }
      }
    }
    order.push_back(chunk->front());
    chunk->erase(chunk->begin());
    if (chunk->empty()) {
      left.erase(chunk);
    }
  }
  return order;
}

}  // namespace

RankOrder RankProgram::order(std::size_t step) const {
  using Kind = RankWork::Kind;
  if (is_random()) {
    return random_order(*this, microbatches[step]);
  }
  const std::size_t count = microbatches[step];
  RankOrder whole = schedule == RankSchedule::forwards_first
                        ? forwards_first(place, count)
                        : rank_order(place, count, schedule == RankSchedule::zero_bubble);
  RankOrder order;
  const auto meet = [&](Kind a, Kind b, std::size_t i) {
    return i + 1 < whole.size() && whole[i].kind == a && whole[i + 1].kind == b &&
           (whole[i].part != whole[i + 1].part || whole[i].microbatch != whole[i + 1].microbatch);
  };
  for (std::size_t i = 0; i < whole.size(); ++i) {
    if (extra == RankExtra::forwards_alone && i % 3 == 0) {
      order.push_back({Kind::evaluate, i % place.parts, count + i});
      order.push_back({Kind::abandoned, i % place.parts, count + i + 1});
    }
    if ((extra == RankExtra::cut &&
         (meet(Kind::forward, Kind::backward, i) || meet(Kind::backward, Kind::forward, i))) ||
        (extra == RankExtra::alternating && meet(Kind::forward, Kind::forward, i))) {
      const RankOrder turns = layers_in_turn(whole[i], whole[i + 1], layers);
      order.insert(order.end(), turns.begin(), turns.end());
      ++i;
    } else if (extra == RankExtra::overtaking && meet(Kind::forward, Kind::forward, i)) {
      for (std::size_t l = 0; l < layers; ++l) {
        RankWork work = whole[i];
        work.layer = l;
        order.push_back(work);
        if (l == 0) {
          order.push_back(whole[i + 1]);
        }
      }
      ++i;
    } else {
      order.push_back(whole[i]);
    }
  }
  return order;
}

std::vector<RankProgram> rank_programs() {
  using S = RankSchedule;
  return {
      {"alone", {1, 0, 1}, 4, {3, 3, 3}},
      {"first_of_two", {2, 0, 1}, 4, {4, 4, 4}},
      {"first_of_four", {4, 0, 1}, 1, {6, 6, 6}},
      {"last_of_four", {4, 3, 1}, 1, {5, 5, 5}},
      {"two_parts_alone", {1, 0, 2}, 1, {3, 3, 3}},
      {"two_parts_first_of_two", {2, 0, 2}, 1, {4, 4, 4}},
      {"two_parts_last_of_two", {2, 1, 2}, 4, {4, 4, 4}},
      {"three_parts_second_of_three", {3, 1, 3}, 1, {6, 6, 6}},
      {"three_parts_uneven", {3, 0, 3}, 1, {5, 5, 5}},
      {"forwards_first", {2, 0, 2}, 2, {4, 4, 4}, S::forwards_first},
      {"zero_bubble_first_of_two", {2, 0, 1}, 4, {4, 4, 4}, S::zero_bubble},
      {"zero_bubble_first_of_four", {4, 0, 1}, 2, {6, 6, 5, 6}, S::zero_bubble},
      {"zero_bubble_last_of_four", {4, 3, 1}, 4, {6, 6, 6}, S::zero_bubble},
      {"zero_bubble_two_parts", {2, 0, 2}, 4, {4, 4, 4}, S::zero_bubble},
      {"counts_change", {2, 0, 2}, 1, {2, 4, 1, 6, 3, 6}},
      {"forwards_alone", {2, 0, 2}, 2, {4, 4, 4, 2, 4}, S::one_forward_one_backward, RankExtra::forwards_alone},
      {"hybrid", {2, 0, 2}, 3, {4, 4, 4, 2, 4}, S::one_forward_one_backward, RankExtra::hybrid},
      {"cut", {2, 0, 2}, 3, {4, 4, 4, 2, 4}, S::one_forward_one_backward, RankExtra::cut},
      {"zero_bubble_cut", {2, 0, 1}, 4, {4, 4, 4}, S::zero_bubble, RankExtra::cut},
      {"zero_bubble_cut_two_parts", {2, 0, 2}, 3, {4, 4, 4}, S::zero_bubble, RankExtra::cut},
      {"overtaking", {2, 0, 2}, 2, {4, 4, 4, 2, 4}, S::one_forward_one_backward, RankExtra::overtaking},
      {"alternating", {2, 0, 2}, 2, {4, 4, 4, 2, 4}, S::one_forward_one_backward, RankExtra::alternating},
  };
}

std::vector<RankProgram> random_programs() {
  std::vector<RankProgram> all;
  for (std::size_t seed = 0; seed < 12; ++seed) {
    all.push_back({"random" + std::to_string(seed),
                   {2, 0, 1 + seed % 3},
                   2 + seed % 2,
                   {4, 4, 4},
                   RankSchedule::forwards_first,
                   seed % 2 == 0 ? RankExtra::random : RankExtra::random_cut,
                   seed});
  }
  return all;
}

std::vector<RankProgram> for_callables(std::vector<RankProgram> programs) {
  std::erase_if(programs, [](const RankProgram& program) {
    return program.extra == RankExtra::alternating || program.extra == RankExtra::overtaking ||
           (program.extra == RankExtra::cut && program.schedule == RankSchedule::zero_bubble);
  });
  return programs;
}

std::vector<RankProgram> random_callable_programs() {
  std::vector<RankProgram> all;
  for (std::size_t seed = 0; seed < 15; ++seed) {
    const bool delayed = seed >= 9;
    const std::size_t count = 2 + seed % 4;
    all.push_back({"random_whole" + std::to_string(seed) + (delayed ? "_delayed" : ""),
                   {2, seed / 2 % 2, 1 + seed % 3},
                   1 + seed / 2 % 4,
                   {count, count, count},
                   delayed ? RankSchedule::zero_bubble : RankSchedule::forwards_first,
                   delayed || seed % 2 == 0 ? RankExtra::random_whole : RankExtra::random_whole_cut,
                   seed});
  }
  return all;
}

std::vector<RankProgram> deep_programs() {
  return {
      {"cut_deep", {2, 0, 1}, 6, {4, 4, 2, 4}, RankSchedule::one_forward_one_backward, RankExtra::cut},
      {"cut_deep_last", {2, 1, 2}, 6, {4, 4, 4}, RankSchedule::one_forward_one_backward, RankExtra::cut},
  };
}

std::vector<RankProgram> every_order(RankSchedule schedule) {
  std::vector<RankProgram> all;
  for (std::size_t ranks = 1; ranks <= 4; ++ranks) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      for (std::size_t parts = 1; parts <= 3; ++parts) {
        for (std::size_t count = 1; count <= 12; ++count) {
          const std::string name = "rank_" + std::to_string(rank) + "_of_" + std::to_string(ranks) + "_" +
                                   std::to_string(parts) + "_parts_" + std::to_string(count) + "_microbatches";
          const std::size_t layers = 1 + (ranks + rank + parts + count) % 3;
          // A step with another count may run some calls eagerly, which do not delay: their gradients would be added in another order.
          const std::size_t other = schedule == RankSchedule::zero_bubble ? count : count > 1 ? count - 1 : 2;
          all.push_back({name, {ranks, rank, parts}, layers, {count, count, count, other}, schedule});
        }
      }
    }
  }
  return all;
}

}  // namespace sidestream::testing_model
