#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "runtime/runtime.h"

namespace sidestream {
class OffloadEngine;
}

namespace sidestream::testing_model {

/// A small training program that needs some of the engine's rules. Deterministic: the same without the engine.
class Program {
 public:
  Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  virtual ~Program() = default;
  /// Runs step `s` of 0, 1, 2, ... on new data and gives its gradients. The sizing pass and the captures are over after two.
  virtual std::vector<at::Tensor> step(std::int64_t s) = 0;
  /// Null in plain training.
  [[nodiscard]] virtual const OffloadEngine* engine() const = 0;
};

/// Who serves a program. The model's own streams and events are those of `model`.
struct Runtimes {
  std::shared_ptr<Runtime> model;
  std::shared_ptr<Runtime> engine;  ///< null: plain training without an engine
};

struct NamedProgram {
  std::string name;
  std::function<std::unique_ptr<Program>(const Runtimes&)> make;
};

/// Eager, graphed and mixed; whole steps and those that leave layers out, stop a backward or use several streams.
[[nodiscard]] const std::vector<NamedProgram>& programs();
[[nodiscard]] const NamedProgram& program(const std::string& name);

/// Those that say when their eager groups are offloaded and reloaded; part of `programs`.
[[nodiscard]] std::vector<NamedProgram> asked_programs();
/// Those of eager groups on several streams; part of `programs`.
[[nodiscard]] std::vector<NamedProgram> stream_programs();
/// Those that keep outputs of graphed calls; part of `programs`.
[[nodiscard]] std::vector<NamedProgram> output_programs();
/// Those whose eager code saves outputs of graphed calls; part of `programs`.
[[nodiscard]] std::vector<NamedProgram> between_programs();
/// Those of graphed callables; part of `programs`.
[[nodiscard]] std::vector<NamedProgram> callable_programs();
/// Those of graphed callables in an order, or with delayed weight gradients; part of `programs`.
[[nodiscard]] std::vector<NamedProgram> callable_order_programs();
/// Those whose graphed calls are made on several streams; part of `programs`.
[[nodiscard]] std::vector<NamedProgram> call_stream_programs();
/// Those that run the order of a pipeline's rank; part of `programs`.
[[nodiscard]] std::vector<NamedProgram> pipeline_programs();
/// Those of sequences that share a pool; part of `programs`.
[[nodiscard]] std::vector<NamedProgram> pool_programs();
/// Those whose graphs draw on several streams; part of `programs`.
[[nodiscard]] std::vector<NamedProgram> drawing_programs();
/// Those whose whole step is one graph; part of `programs`.
[[nodiscard]] std::vector<NamedProgram> whole_step_programs();

}  // namespace sidestream::testing_model
