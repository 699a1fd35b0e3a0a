// Random trainer programs, each beside a plain twin without an engine.
//
//   habits                              so many programs, dealt out over processes; the counts at the end must show that they did something
//     --programs N --shards N --seed N  also SIDESTREAM_HABITS_PROGRAMS, _SHARDS and _SEED; the seed may be "random"
//     --device NAME                     also SIDESTREAM_HABITS_DEVICE: sim, or cuda
//     --seconds N                       begins no further program after so long
//     --longest N                       actions of a program
//     --only NAMES --without NAMES      kinds of actions, with commas
//     --forms NUMBERS --parts NUMBERS   of the model and its wrapping
//     --folder PATH                     where programs, failures and counts are written
//   habits --replay FILE                runs one program again
//   habits --shrink FILE                leaves out actions while it still fails or crashes, each try in a process of its own
//
// Prints TAP. A program is on disk before it runs: a process that dies leaves it in FOLDER/SHARD/program.txt.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Context.h>

#include "habits/shard.h"
#include "habits/small_model.h"
#include "habits/statistics.h"
#include "habits/trainer.h"

namespace {

using namespace sidestream::habits;

struct Arguments {
  ShardOptions options;
  std::int64_t shards = 2;
  std::int64_t shard = -1;  ///< -1: all, each in a process
  std::string replay, shrink;
};

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> words;
  std::istringstream in(list);
  for (std::string word; std::getline(in, word, ',');) {
    words.push_back(word);
  }
  return words;
}

std::vector<std::int64_t> numbers(const std::string& list) {
  std::vector<std::int64_t> result;
  for (const std::string& word : split(list)) {
    result.push_back(std::stoll(word));
  }
  return result;
}

std::vector<Kind> kinds(const std::string& list) {
  std::vector<Kind> result;
  for (const std::string& name : split(list)) {
    const auto kind = kind_named(name);
    if (!kind) {
      throw std::runtime_error("no action is called " + name);
    }
    result.push_back(*kind);
  }
  return result;
}

std::string environment(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

std::uint64_t seed_of(const std::string& text) { return text == "random" ? std::random_device()() : std::stoull(text); }

Arguments parse(int argc, char** argv) {
  Arguments result;
  ShardOptions& options = result.options;
  options.programs = std::stoll(environment("SIDESTREAM_HABITS_PROGRAMS", "2000"));
  options.seed = seed_of(environment("SIDESTREAM_HABITS_SEED", "1"));
  result.shards = std::stoll(environment("SIDESTREAM_HABITS_SHARDS", "2"));
  options.device = environment("SIDESTREAM_HABITS_DEVICE", "sim");
  options.folder = "habits_programs";
  for (const Habit& each : habits()) {
    options.drawn.push_back(each.kind);
  }
  for (std::size_t i = 0; i < forms().size(); ++i) {
    options.forms.push_back(static_cast<std::int64_t>(i));
  }
  for (std::int64_t part = 0; part < Block::kParts; ++part) {
    options.parts.push_back(part);
  }
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--programs") {
      options.programs = std::stoll(value);
    } else if (name == "--seed") {
      options.seed = seed_of(value);
    } else if (name == "--shards") {
      result.shards = std::stoll(value);
    } else if (name == "--shard") {
      result.shard = std::stoll(value);
    } else if (name == "--device") {
      options.device = value;
    } else if (name == "--seconds") {
      options.seconds = std::stoll(value);
    } else if (name == "--longest") {
      options.longest = std::stoi(value);
    } else if (name == "--only") {
      options.drawn = kinds(value);
    } else if (name == "--without") {
      for (const Kind kind : kinds(value)) {
        options.drawn.erase(std::remove(options.drawn.begin(), options.drawn.end(), kind), options.drawn.end());
      }
    } else if (name == "--forms") {
      options.forms = numbers(value);
    } else if (name == "--parts") {
      options.parts = numbers(value);
    } else if (name == "--folder") {
      options.folder = value;
    } else if (name == "--replay") {
      result.replay = value;
    } else if (name == "--shrink") {
      result.shrink = value;
    } else {
      throw std::runtime_error("unknown argument " + name);
    }
  }
  if (options.device != "sim") {
    // A gradient that plain training hands on transposed is dense behind a graph, and cuBLAS may take another kernel for it.
    options.drawn.erase(std::remove(options.drawn.begin(), options.drawn.end(), Kind::restrided_argument),
                        options.drawn.end());
  }
  return result;
}

/// Starts this program again with `arguments`.
pid_t start(std::vector<std::string> arguments, bool quiet) {
  const pid_t child = fork();
  if (child != 0) {
    return child;
  }
  if (quiet) {
    const int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, 1);
    dup2(nowhere, 2);
  } else {
    dup2(2, 1);
  }
  std::vector<char*> raw;
  for (std::string& argument : arguments) {
    raw.push_back(argument.data());
  }
  raw.push_back(nullptr);
  execv("/proc/self/exe", raw.data());
  _exit(127);
}

/// How a process ended, in words; empty when it went well.
std::string wait_for(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) {
    return "died of signal " + std::to_string(WTERMSIG(status));
  }
  return WEXITSTATUS(status) == 0 ? "" : "failed";
}

void write(const std::string& path, const ProgramText& program) {
  std::ofstream out(path, std::ios::trunc);
  out << program.setup << '\n';
  for (const Action& action : program.actions) {
    out << action << '\n';
  }
}

/// The smallest program that still ends badly, in FILE.shrunk.
void shrink(const std::string& file, const std::string& device) {
  std::ifstream in(file);
  ProgramText program = read_program(in);
  const std::string path = file + ".shrunk";
  const auto fails = [&](const ProgramText& tried) {
    write(path + ".try", tried);
    return !wait_for(start({"habits", "--device", device, "--replay", path + ".try"}, /*quiet=*/true)).empty();
  };
  for (std::size_t length = program.actions.size() / 2; length > 0; length /= 2) {
    for (std::size_t at = 0; at + length <= program.actions.size();) {
      ProgramText tried = program;
      const auto first = tried.actions.begin() + static_cast<std::ptrdiff_t>(at);
      tried.actions.erase(first, first + static_cast<std::ptrdiff_t>(length));
      if (fails(tried)) {
        program = std::move(tried);
      } else {
        at += length;
      }
    }
  }
  for (std::size_t i = 0; i < program.setup.parts.size() && program.setup.parts.size() > 1;) {
    ProgramText tried = program;
    tried.setup.parts.erase(tried.setup.parts.begin() + static_cast<std::ptrdiff_t>(i));
    if (fails(tried)) {
      program = std::move(tried);
    } else {
      ++i;
    }
  }
  write(path, program);
  std::remove((path + ".try").c_str());
  std::cerr << "shrunk to " << path << '\n' << std::ifstream(path).rdbuf();
}

void say(int number, const std::string& name, const std::vector<std::string>& breaches) {
  std::cout << (breaches.empty() ? "ok " : "not ok ") << number << " - " << name << '\n';
  for (std::size_t i = 0; i < breaches.size() && i < 20; ++i) {
    std::cout << "# " << breaches[i] << '\n';
  }
  if (breaches.size() > 20) {
    std::cout << "# and " << breaches.size() - 20 << " more\n";
  }
}

int run_all(const Arguments& arguments, int argc, char** argv) {
  const ShardOptions& options = arguments.options;
  mkdir(options.folder.c_str(), 0777);
  std::cerr << "habits: seed " << options.seed << ", programs in " << options.folder << '\n';
  std::vector<pid_t> children;
  std::vector<std::string> folders;
  for (std::int64_t shard = 0; shard < arguments.shards; ++shard) {
    folders.push_back(options.folder + "/" + std::to_string(shard));
    mkdir(folders.back().c_str(), 0777);
    std::remove((folders.back() + "/failed.txt").c_str());
    std::vector<std::string> call(argv, argv + argc);
    const std::int64_t share =
        options.programs / arguments.shards + (shard < options.programs % arguments.shards ? 1 : 0);
    for (const std::string& word :
         {std::string("--shard"), std::to_string(shard), std::string("--seed"), std::to_string(options.seed + shard),
          std::string("--programs"), std::to_string(share), std::string("--folder"), folders.back()}) {
      call.push_back(word);
    }
    children.push_back(start(std::move(call), /*quiet=*/false));
  }
  Statistics statistics;
  std::vector<std::string> ends;
  for (std::size_t shard = 0; shard < children.size(); ++shard) {
    const std::string end = wait_for(children[shard]);
    std::ifstream in(folders[shard] + "/statistics.txt");
    statistics.read(in);
    if (!end.empty()) {
      ends.push_back("shard " + std::to_string(shard) + " (seed " + std::to_string(options.seed + shard) + ") " + end);
      if (end != "failed") {
        std::cerr << "habits: " << ends.back() << " in " << folders[shard] << "/program.txt\n";
        shrink(folders[shard] + "/program.txt", options.device);
      }
    }
  }
  statistics.print(std::cerr);
  const auto demands = statistics.demands(options.drawn);
  std::cout << "1.." << demands.size() + 1 << '\n';
  say(1, "programs give what plain training gives", ends);
  int number = 1;
  bool all = ends.empty();
  for (const Statistics::Demand& demand : demands) {
    say(++number, demand.name, demand.breaches);
    all = all && demand.breaches.empty();
  }
  return all ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  at::globalContext().setUserEnabledMkldnn(false);  // as in tests/gtest_main.cpp
  try {
    const Arguments arguments = parse(argc, argv);
    if (arguments.options.device != "sim") {  // what cuBLAS asks for where algorithms must be deterministic
      setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    }
    if (!arguments.replay.empty()) {
      return replay(arguments.replay, arguments.options.device) ? 0 : 1;
    }
    if (!arguments.shrink.empty()) {
      shrink(arguments.shrink, arguments.options.device);
      return 0;
    }
    if (arguments.shard >= 0) {
      return run_shard(arguments.options) ? 0 : 1;
    }
    return run_all(arguments, argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "habits: " << error.what() << '\n';
    return 2;
  }
}
