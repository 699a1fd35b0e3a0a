#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>

#include <c10/core/Device.h>
#include <gtest/gtest.h>

#include "sidestream/report.h"
#include "unit/graphs/rank_pipeline.h"
#include "unit/graphs/rank_programs.h"

namespace sidestream::testing_model {

/// How the engine runs the layers of a rank.
enum class RankWay : std::uint8_t { eager, calls, shared, callables, ordered_callables };

/// What the engine is told of chunks.
enum class RankChunks : std::uint8_t { none, begun, ordered };

using RankParameter = std::tuple<RankProgram, RankWay, RankChunks>;
[[nodiscard]] std::string name_of_rank(const testing::TestParamInfo<RankParameter>& info);

/// Sees each step, its order, and the report after it.
using RankCheck = std::function<void(std::size_t, const RankOrder&, const Report&)>;

/// Trains the rank's parts with the engine and plainly, and compares all gradients bit for bit.
void train_rank(const RankProgram& program, RankWay way, RankChunks chunks, c10::Device device, const RankCheck& check);

}  // namespace sidestream::testing_model
