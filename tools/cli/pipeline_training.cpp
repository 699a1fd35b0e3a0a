#include "tools/cli/pipeline_training.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "examples/pipeline/pipeline.h"
#include "examples/pipeline/ranks.h"
#include "examples/pipeline/store_backend.h"
#include "sidestream/error.h"
#include "tools/cli/device_choice.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/measurement.h"
#include "tools/cli/progress_line.h"
#include "tools/cli/result_files.h"
#include "tools/cli/standard_output.h"
#include "tools/cli/train_command.h"
#include "tools/cli/training_result.h"
#include "tools/cli/training_run.h"

namespace sidestream::cli {

// A rank sends these to the last rank.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(OffloadNumbers, bytes_per_step, in_flight, pinned_bytes, waits_per_step, graphs,
                                   forecast_peak, forecast_seconds, notes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModeResult, name, steps, step_seconds, live, allocated, reserved, first_reserved,
                                   offload, trace)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(VerifiedNumbers, forwards, backwards, tolerance)

namespace {

using Ranks = c10::intrusive_ptr<pipeline::StoreBackend>;
using RankJson = nlohmann::json;

constexpr int kTextTag = -2;  // chunks have tags from 0
constexpr int kTensorTag = -3;

void send_text(const Ranks& ranks, int to, const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<std::uint8_t>());
  std::vector<at::Tensor> size{at::scalar_tensor(bytes.numel(), at::kLong)};
  std::vector<at::Tensor> message{bytes};
  ranks->send(size, to, kTextTag)->wait();
  ranks->send(message, to, kTextTag)->wait();
}

std::string receive_text(const Ranks& ranks, int from) {
  std::vector<at::Tensor> size{at::zeros({}, at::kLong)};
  ranks->recv(size, from, kTextTag)->wait();
  std::vector<at::Tensor> message{at::empty({size.front().item<std::int64_t>()}, at::kByte)};
  ranks->recv(message, from, kTextTag)->wait();
  const auto* bytes = message.front().const_data_ptr<std::uint8_t>();
  return {bytes, bytes + message.front().numel()};
}

void add_rank(TrainingResult& result, int rank, const RankJson& json) {
  result.modes.push_back(json.at("mode").get<ModeResult>());
  result.modes.back().name = fmt::format("rank {}", rank);
  const auto verified = json.at("verified").get<VerifiedNumbers>();
  result.verified.forwards += verified.forwards;
  result.verified.backwards += verified.backwards;
}

/// One rank's training. The last rank has the loss: it prints, and with --compare it runs plain training of the whole model beside.
class RankTraining {
 public:
  RankTraining(const TrainingOptions& options, const TextCorpus& corpus, Ranks ranks)
      : options_(options),
        corpus_(corpus),
        ranks_(std::move(ranks)),
        device_(choose_device(options)),
        last_(ranks_->getSize() - 1),
        dtype_(options.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat),
        pipeline_(options.pipeline(), ranks_,
                  at::empty({options.batch / options.microbatches, options.shape.seq, options.shape.hidden},
                            at::dtype(dtype_).device(device_.device))) {}

  /// `files`: of the last rank; else null.
  int run(ResultFiles* files) {
    const c10::DeviceGuard current(device_.device);
    describe();
    std::optional<InterruptGuard> interrupt;  // rank 0 decides for all
    if (ranks_->getRank() == 0) {
      interrupt.emplace();
    }
    std::optional<ProgressLine> progress;
    if (reports()) {
      progress.emplace(stdout, "train", static_cast<std::size_t>(options_.steps),
                       static_cast<std::size_t>(options_.tokens_per_step()));
    }
    TrainingRun main(
        options_, device_.device, {.graphs = options_.graphed(), .offload = options_.offloads()}, corpus_,
        [&](const Progress& begun) {
          if (progress) {
            progress->phase(begun);
          }
        },
        rank());
    result_.parameters = main.parameter_count();
    if (options_.compare) {
      begin_comparison(main);
    }
    Measurement measurement(options_, device_.device, {});
    while (result_.steps_done < options_.steps && !stopped(interrupt)) {
      double loss = 0;
      step(measurement, main, loss);
      result_.train.first = result_.steps_done == 0 ? loss : result_.train.first;
      result_.train.last = loss;
      ++result_.steps_done;
      if (progress) {
        progress->step(static_cast<std::size_t>(result_.steps_done), loss);
      }
    }
    progress.reset();
    if (options_.compare) {
      compare_parameters(main);
    }
    ModeResult measured = measurement.finish(main);
    if (options_.compare) {
      measured.steps = 0;  // their times have the comparison's in them
      measured.step_seconds = 0;
    }
    if (options_.trace.empty()) {
      measured.trace.clear();
    }
    const VerifiedNumbers verified = main.verified_numbers();
    result_.verified.tolerance = verified.tolerance;  // the same in all ranks
    return finish({{"mode", measured}, {"verified", verified}}, files);
  }

 private:
  [[nodiscard]] bool reports() const { return ranks_->getRank() == last_; }

  void describe() {
    result_ = described(options_, corpus_, device_.name);
    if (reports()) {
      print(fmt::format("text: {} files, {} bytes from {}, byte entropy {:.4f} nats\ndevice: {} in each rank\n",
                        result_.text_files, result_.text_bytes, result_.text_source, result_.byte_entropy,
                        result_.device_name));
    }
  }

  [[nodiscard]] PipelineRank rank() {
    PipelineRank rank;
    rank.order = pipeline_.order();
    for (std::int64_t stage = 0; stage < options_.vpp; ++stage) {
      rank.parts.push_back(pipeline_.part(stage));
    }
    rank.run = [this](const PipelineRank::Stage& stage, const PipelineRank::WeightGradients& weights) {
      return pipeline_.step(stage, weights);
    };
    return rank;
  }

  /// The signal that rank 0 got decides, so that all ranks end after the same step.
  [[nodiscard]] bool stopped(const std::optional<InterruptGuard>& interrupt) {
    std::vector<at::Tensor> signal{at::scalar_tensor(interrupt ? interrupt->signal() : 0, at::kLong)};
    ranks_->broadcast(signal, {})->wait();
    result_.signal = signal.front().item<int>();
    return result_.signal != 0;
  }

  void begin_comparison(const TrainingRun& main) {
    if (!reports()) {
      std::vector<std::string> names;
      for (const auto& [name, parameter] : main.parameters()) {
        names.push_back(name);
      }
      send_text(ranks_, last_, RankJson(names).dump());
      return;
    }
    // The simulated device computes what the CPU computes; its memory is left to the rank.
    plain_.emplace(options_, device_.device.is_cuda() ? device_.device : c10::Device(c10::kCPU), TrainingMode{},
                   corpus_);
    result_.comparison.emplace(dtype_, options_.tokens_per_step(), /*exact=*/true);
    for (int rank = 0; rank < last_; ++rank) {
      for (const std::string name : RankJson::parse(receive_text(ranks_, rank))) {
        rank_of_.emplace(name, rank);
      }
    }
  }

  void step(Measurement& measurement, TrainingRun& main, double& loss) {
    if (!options_.compare) {
      measurement.step(main, loss);
    } else if (!reports()) {
      measurement.step(main, loss, [&] { send_all(main, [](const at::Tensor& tensor) { return tensor.grad(); }); });
    } else {
      plain_->step([&] {
        measurement.step(main, loss, [&] {
          NamedTensors all = whole_model(main);
          result_.comparison->compare(all, plain_->parameters());
        });
      });
    }
  }

  /// To the last rank, in the order of the names that it was sent.
  void send_all(const TrainingRun& main, const std::function<at::Tensor(const at::Tensor&)>& of) {
    for (const auto& [name, parameter] : main.parameters()) {
      std::vector<at::Tensor> message{of(parameter)};
      if (!message.front().defined()) {
        throw Error(fmt::format("parameter {} has no gradient after a step", name));
      }
      ranks_->send(message, last_, kTensorTag)->wait();
    }
  }

  /// The parameters of all ranks, in the plain model's order. Those of other ranks are stand-ins: what the rank sent is their gradient.
  [[nodiscard]] NamedTensors whole_model(const TrainingRun& main) {
    std::map<std::string, at::Tensor> own;
    for (const auto& [name, parameter] : main.parameters()) {
      own.emplace(name, parameter);
    }
    NamedTensors all;
    for (const auto& [name, parameter] : plain_->parameters()) {
      if (const auto found = own.find(name); found != own.end()) {
        all.emplace_back(name, found->second);
        continue;
      }
      const auto rank = rank_of_.find(name);
      if (rank == rank_of_.end()) {
        throw Error(fmt::format("no rank trains parameter {}", name));
      }
      std::vector<at::Tensor> received{at::empty_like(parameter.detach())};
      ranks_->recv(received, rank->second, kTensorTag)->wait();
      at::Tensor stand_in = at::empty_like(parameter.detach());
      stand_in.mutable_grad() = received.front();
      all.emplace_back(name, stand_in);
    }
    return all;
  }

  void compare_parameters(const TrainingRun& main) {
    if (!reports()) {
      return send_all(main, [](const at::Tensor& tensor) { return tensor; });
    }
    const NamedTensors ours = whole_model(main);
    const NamedTensors theirs = plain_->parameters();
    result_.parameters_equal = std::equal(ours.begin(), ours.end(), theirs.begin(), [&](const auto& a, const auto& b) {
      const bool received = rank_of_.count(a.first) > 0;
      return at::equal((received ? a.second.grad() : a.second.detach()).to(at::kCPU), b.second.detach().to(at::kCPU));
    });
  }

  /// Brings the numbers of all ranks together.
  [[nodiscard]] int finish(const RankJson& numbers, ResultFiles* files) {
    if (!reports()) {
      send_text(ranks_, last_, numbers.dump());
    } else {
      for (int rank = 0; rank < last_; ++rank) {
        add_rank(result_, rank, RankJson::parse(receive_text(ranks_, rank)));
      }
      add_rank(result_, last_, numbers);
      print(result_table(result_));
      files->write(result_);
      if (result_.comparison && (!result_.comparison->all_equal() || !result_.parameters_equal)) {
        throw Error("the gradients or the trained parameters differ from those of one process (see the table)");
      }
    }
    return result_.signal != 0 ? kSignalled + result_.signal : kSuccess;
  }

  const TrainingOptions& options_;
  const TextCorpus& corpus_;
  Ranks ranks_;
  ChosenDevice device_;
  int last_;
  at::ScalarType dtype_;
  pipeline::Pipeline pipeline_;
  TrainingResult result_;
  std::optional<TrainingRun> plain_;    ///< --compare: the whole model
  std::map<std::string, int> rank_of_;  ///< of the parameters of other ranks
};

int run_rank(const TrainingOptions& options, const TextCorpus& corpus, const pipeline::RankEnvironment& place) {
  if (place.size != *options.pp) {
    throw UsageError(
        fmt::format("WORLD_SIZE is {}, but --pp is {}: start as many ranks as --pp says", place.size, *options.pp));
  }
  std::optional<ResultFiles> files;
  if (place.rank + 1 == place.size) {
    files.emplace(options);
  }
  const std::chrono::milliseconds limit = std::chrono::seconds(options.rank_timeout);
  const auto ranks =
      c10::make_intrusive<pipeline::StoreBackend>(pipeline::connect(place, limit), place.rank, place.size, limit);
  const auto failed = [&](const std::string& what) {
    const std::string line = what.substr(0, what.find('\n'));
    ranks->fail(fmt::format("rank {} failed: {}", place.rank, line), place.serves_store);
    return fmt::format("rank {}: {}", place.rank, line);
  };
  try {
    ranks->barrier({})->wait();  // all are there
    const int code = RankTraining(options, corpus, ranks).run(files ? &*files : nullptr);
    ranks->leave(place.serves_store);
    return code;
  } catch (const UsageError& error) {
    throw UsageError(failed(error.what()));
  } catch (const c10::Error& error) {
    throw Error(failed(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    throw Error(failed(error.what()));
  }
}

}  // namespace

int train_in_pipeline(TrainingOptions options, const TextCorpus& corpus) {
  if (options.device == "auto") {
    options.device = "sim";
  }
  if (const auto place = pipeline::rank_environment()) {
    if (options.device == "cuda") {
      options.device += ":" + std::to_string(place->local);  // a GPU for each rank
    }
    return run_rank(options, corpus, *place);
  }
  { const ResultFiles tried(options); }
  const pipeline::RanksEnd end = pipeline::run_ranks(static_cast<int>(*options.pp));
  if (end.failed.empty()) {
    return end.code;
  }
  if (end.code == kUsage) {
    throw UsageError(end.failed);
  }
  throw Error(end.failed);
}

}  // namespace sidestream::cli
