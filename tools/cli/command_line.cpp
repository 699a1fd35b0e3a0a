#include "tools/cli/command_line.h"

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "sidestream/error.h"
#include "sidestream/version.h"
#include "tools/cli/check_command.h"
#include "tools/cli/info_command.h"
#include "tools/cli/order_command.h"
#include "tools/cli/report_command.h"
#include "tools/cli/shortage_note.h"
#include "tools/cli/simulate_command.h"
#include "tools/cli/startup.h"
#include "tools/cli/train_command.h"
#include "tools/cli/value_checks.h"

namespace sidestream::cli {
namespace {

constexpr const char* kFooter = R"(Examples:
  sidestream train --compare
      Trains on the default text with layers in graphs and their activations offloaded. Compares every gradient with plain eager
      training's.
  sidestream train --text book.txt --layers 6 --hidden 192 --heads 6 --steps 1000 --report run.json
  sidestream train --offload qkv,core_attn,proj --side-streams 1 --schedule seed:7
  sidestream train --device cuda --dtype bfloat16 --hidden 1024 --heads 16 --kv-heads 4 --ffn 2816 --seq 1024 --batch 8
  sidestream train --model moe --compare
      Trains a mixture of experts. Attention and router of each layer are graphs, the experts run eagerly, and the activations of
      both are offloaded.
  sidestream train --pp 2 --microbatches 8 --compare
      Trains in a pipeline of two processes, and compares every gradient with that of one process.
  sidestream train --steps 10 --check-steps 10 --journal steps.journal
      Checks that all memory accesses of the first ten steps are ordered. Check the journal again with: sidestream check
      steps.journal
  sidestream train --steps 200 --verify-replays 5
      Repeats the first five replays of each layer eagerly, and then one in a hundred, and compares all results.
  sidestream check --schedules 1000 --layers 4 --side-streams 2
      Runs two recorded steps in a thousand orders that streams and events allow, and compares the gradients byte for byte.
  sidestream order --pp 4 --vpp 2 --microbatches 16 --svg order.svg
      Shows the order in which each rank of a pipeline runs its microbatches, and draws it.
  sidestream simulate --pp 4 --vpp 2 --microbatches 16 --trace step.json
      Says what a step of each rank will take with the costs of a layer: its time, its waits and its peak of memory.
  sidestream report rank0.json rank1.json
      Shows as one table what the engine of each rank did. Your trainer writes the files with Report::json.
  sidestream info

--report and --journal write a complete file or none. If FILE is a symbolic link, the link is kept and its target is written. A
pipe, a terminal or /dev/null is written to, never replaced.
Ctrl-C, SIGTERM and SIGHUP end a run after the current step. The table, the report and the journal then cover the finished
steps. A second Ctrl-C or SIGTERM ends the run immediately and leaves no incomplete file.
Exit codes: 0 success; 1 failure, including gradients or replays that differ, accesses that nothing orders, and a full disk;
2 wrong usage; 130, 143 or 129 if Ctrl-C, SIGTERM or SIGHUP ended the run.)";

constexpr const char* kCheckFooter = R"(Examples:
  sidestream check steps.journal
  sidestream check --schedules 10000 --layers 2 --graphs off
  sidestream check --schedule seed:77 --layers 2 --graphs off
      Runs one schedule again with the same model and options, and names the pair of operations whose order matters.

Schedules run on the sim device, in this sequence, up to the given number:
  early, late, d2h-early, d2h-late
  starve:N   one for each stream, which runs only if nothing else may run
  hold:N     one for each piece of work that nothing orders against another, held back as long as possible
  hold:N for all other work, and seed:N (a random order), in turns; then only seed:N
Exit codes: 0 all orders give the same bytes; 1 an order gives other bytes, or accesses are not ordered; 2 wrong usage; 130, 143
or 129 if Ctrl-C, SIGTERM or SIGHUP ended the run.)";

/// One line: a user can act on what happened, not on a stack of LibTorch's frames.
int complain(std::string_view what, int code) {
  const std::string line(what.substr(0, what.find('\n')));
  std::fflush(stdout);
  std::fprintf(stderr, "sidestream: %s\n", line.c_str());
  return code;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Trains a byte-level language model with graphs and offload, and checks, simulates and reports such training.",
      "sidestream");
  app.set_version_flag("--version", std::string("sidestream ") + version());
  app.require_subcommand(1);
  TrainingOptions options;
  CLI::App* train = app.add_subcommand(
      "train", "Train a model on text; a table at the end shows the memory saved and the step times");
  train->footer(kFooter);
  declare_training_options(*train, options);
  CheckOptions checked;
  CLI::App* check = app.add_subcommand(
      "check", "Check the order of work: read a journal, or run recorded steps in many orders and compare the results");
  check->footer(kCheckFooter);
  declare_check_options(*check, checked);
  OrderOptions ordered;
  CLI::App* order = app.add_subcommand("order", "Show the orders in which the ranks of a pipeline run microbatches");
  declare_order_options(*order, ordered);
  SimulateOptions simulated;
  CLI::App* simulate =
      app.add_subcommand("simulate", "Say what a step of a pipeline will take: time, waits and memory");
  declare_simulate_options(*simulate, simulated);
  std::vector<std::string> files;
  CLI::App* report = app.add_subcommand("report", "Show the reports of several ranks as one table");
  declare_report_options(*report, files);
  const CLI::App* info =
      app.add_subcommand("info", "Show devices, versions and the measured copy speed to and from each device");
  app.footer(kFooter);  // a command takes over the footer that is set before it
  for (CLI::App* const command : {train, check, order, simulate}) {
    check_values(*command);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {
    return app.exit(asked);
  } catch (const CLI::ParseError& error) {
    const bool misspelled = app.get_subcommands().empty() && argc > 1 && argv[1][0] != '-';
    const std::string what = misspelled ? "'" + std::string(argv[1]) + "' is no command" : error.what();
    return complain(what + " (sidestream --help lists the commands, sidestream COMMAND --help the options of one)",
                    kUsage);
  }
  if (check->parsed()) {
    return cli::check(checked);
  }
  if (order->parsed()) {
    return cli::order(std::move(ordered));
  }
  if (simulate->parsed()) {
    return cli::simulate(std::move(simulated));
  }
  if (report->parsed()) {
    return cli::report(files);
  }
  return info->parsed() ? cli::info() : cli::train(options);
}

}  // namespace

int run_command_line(int argc, char** argv) {
  ShortageNote shortage;
  const c10::WarningUtils::WarningHandlerGuard hearing(&shortage);
  try {
    const int code = run(argc, argv);
    const bool lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
    return lost && code == kSuccess ? complain("standard output cannot be written, and some of it is lost", kFailure)
                                    : code;
  } catch (const UsageError& error) {
    return complain(error.what(), kUsage);
  } catch (const std::bad_alloc&) {
    return complain(kNoMemory, kFailure);
  } catch (const c10::Error& error) {
    return complain(error.what_without_backtrace() + shortage.text(), kFailure);
  } catch (const std::exception& error) {
    return complain(error.what() + shortage.text(), kFailure);
  }
}

}  // namespace sidestream::cli
