#include "habits/shard.h"

#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <memory>
#include <stdexcept>

#include <rapidcheck.h>
#include <rapidcheck/state.h>

#include "habits/program.h"
#include "habits/small_model.h"
#include "sidestream/device.h"

namespace sidestream::habits {
namespace {

constexpr unsigned kSecondsForOneProgram = 120;

/// Of the generator: whether the latest action was a change between steps, which a step should show.
struct Sequence {
  bool changed = false;
};

template <class T>
T chosen(const std::vector<T>& from) {
  return from[*rc::gen::resize(rc::kNominalSize, rc::gen::inRange<std::size_t>(0, from.size()))];
}

std::int64_t below(std::int64_t bound) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<std::int64_t>(0, bound));
}

class Command : public rc::state::Command<Sequence, Program> {
 public:
  explicit Command(const Action& action) : action_(action) {}
  void apply(Sequence& sequence) const override { sequence.changed = action_.kind != Kind::train && !sequence.changed; }
  void run(const Sequence& /*sequence*/, Program& program) const override { program.perform(action_); }
  void show(std::ostream& out) const override { out << action_; }

 private:
  Action action_;
};

/// Plain steps first: shrinking goes towards them.
Action draw(const std::vector<Kind>& kinds, const Sequence& sequence) {
  std::int64_t total = 0;
  const auto weight_of = [&](Kind kind) {
    return habit(kind).weight * (kind == Kind::train && sequence.changed ? 3 : 1);
  };
  for (const Kind kind : kinds) {
    total += weight_of(kind);
  }
  std::int64_t at = below(total);
  for (const Kind kind : kinds) {
    if (at < weight_of(kind)) {
      return {kind, below(habit(kind).choices_a), below(habit(kind).choices_b)};
    }
    at -= weight_of(kind);
  }
  return {};
}

class Run {
 public:
  explicit Run(const ShardOptions& options) : options_(options), device_(find_device(options.device)) {}

  void one_program() {
    if (options_.seconds > 0 && std::chrono::steady_clock::now() - began_ > std::chrono::seconds(options_.seconds)) {
      return;
    }
    Setup setup;
    setup.form = chosen(options_.forms);
    const std::int64_t blocks = 2 + below(2);
    for (std::int64_t i = 0; i < blocks; ++i) {
      setup.parts.push_back(chosen(options_.parts));
    }
    const auto commands = *rc::gen::resize(
        options_.longest, rc::state::gen::commands(Sequence(), [this](const Sequence& sequence) {
          return rc::gen::exec([this, sequence]() -> std::shared_ptr<const rc::state::Command<Sequence, Program>> {
            return std::make_shared<const Command>(draw(options_.drawn, sequence));
          });
        }));
    const std::string path = options_.folder + "/program.txt";
    std::ofstream log(path, std::ios::trunc);
    alarm(kSecondsForOneProgram);
    const auto began = std::chrono::steady_clock::now();
    Statistics statistics;
    try {
      Program program(setup, device_, log, statistics);
      rc::state::runAll(commands, Sequence(), program);
    } catch (const std::runtime_error& difference) {
      alarm(0);
      log.close();
      std::ofstream failed(options_.folder + "/failed.txt", std::ios::trunc);
      failed << std::ifstream(path).rdbuf() << "# " << difference.what() << '\n';
      RC_FAIL(std::string(difference.what()));
    }
    alarm(0);
    const auto spent = std::chrono::steady_clock::now() - began;
    statistics.add("milliseconds", std::chrono::duration_cast<std::chrono::milliseconds>(spent).count());
    statistics_ += statistics;
    if (statistics_.count("programs") % 50 == 0) {
      save();
    }
  }
  void save() const {
    std::ofstream out(options_.folder + "/statistics.txt", std::ios::trunc);
    statistics_.write(out);
  }

 private:
  const ShardOptions& options_;
  c10::Device device_;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  Statistics statistics_;
};

}  // namespace

bool run_shard(const ShardOptions& options) {
  Run run(options);
  rc::detail::TestParams parameters;
  parameters.seed = options.seed;
  parameters.maxSuccess = static_cast<int>(options.programs);
  rc::detail::TestMetadata metadata;
  metadata.id = metadata.description = "programs give what plain training gives";
  const auto result = rc::detail::checkTestable([&] { run.one_program(); }, metadata, parameters);
  run.save();
  if (!result.is<rc::detail::SuccessResult>()) {
    rc::detail::printResultMessage(result, std::cerr);
    std::cerr << "\nthe smallest program: " << options.folder << "/failed.txt\n";
  }
  return result.is<rc::detail::SuccessResult>();
}

bool replay(const std::string& file, const std::string& device) {
  std::ifstream in(file);
  if (!in) {
    std::cerr << file << ": cannot be read\n";
    return false;
  }
  const ProgramText text = read_program(in);
  Statistics statistics;
  alarm(kSecondsForOneProgram);
  try {
    Program program(text.setup, find_device(device), std::cerr, statistics);
    for (const Action& action : text.actions) {
      program.perform(action);
    }
  } catch (const Difference& difference) {
    std::cerr << "# " << difference.what() << '\n';
    return false;
  }
  statistics.print(std::cerr);
  return true;
}

}  // namespace sidestream::habits
