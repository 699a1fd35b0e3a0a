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

#include "examples/byte_model/byte_model.h"
#include "sidestream/error.h"

namespace sidestream::bench {

/// The sizes of a transformer's layers, as options.
inline void add_layer_options(CLI::App& app, byte_model::ModelShape& shape) {
  const auto add = [&](const char* name, std::int64_t& size) {
    app.add_option(name, size)->check(CLI::PositiveNumber)->capture_default_str();
  };
  add("--layers", shape.layers);
  add("--hidden", shape.hidden);
  add("--heads", shape.heads);
  add("--kv-heads", shape.kv_heads);
  add("--ffn", shape.ffn);
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
