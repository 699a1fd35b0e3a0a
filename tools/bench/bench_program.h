#pragma once
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>

#include <c10/util/Exception.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <CLI/Validators.hpp>

#include "sidestream/error.h"

namespace sidestream::bench {

/// A number above 0, or a list of such numbers.
template <class Value>
void add_positive(CLI::App& app, const char* name, Value& value, const char* help = "") {
  app.add_option(name, value, help)->check(CLI::PositiveNumber)->capture_default_str();
}

/// A number that may be 0.
inline void add_count(CLI::App& app, const char* name, std::int64_t& value, const char* help) {
  app.add_option(name, value, help)->check(CLI::NonNegativeNumber)->capture_default_str();
}

/// The sizes of a transformer's layers. `Shape`: ModelShape or MixtureShape.
template <class Shape>
void add_layer_options(CLI::App& app, Shape& shape) {
  add_positive(app, "--layers", shape.layers);
  add_positive(app, "--hidden", shape.hidden);
  add_positive(app, "--heads", shape.heads);
  add_positive(app, "--kv-heads", shape.kv_heads);
  add_positive(app, "--ffn", shape.ffn);
}

/// Writes `json` to `file`, unless that is empty.
template <class Json>
void write_report(const std::string& file, const Json& json) {
  if (!file.empty() && !(std::ofstream(file) << json.dump(2) << '\n' << std::flush)) {
    throw Error("report '" + file + "' cannot be written");
  }
}

/// A benchmark's main function: `run(argc, argv)`, and one line for an exception.
template <class Run>
int run_benchmark(const char* name, const Run& run, int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
  }
  return 1;
}

}  // namespace sidestream::bench
