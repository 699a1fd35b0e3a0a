#pragma once

namespace sidestream::cli {

/// What the program says where memory ends.
inline constexpr const char* kNoMemory =
    "out of memory; raise the limit (ulimit -v, a container's limit), or use a smaller model";

// startup.cpp has no function to call. Before the static objects of any library are made, it ends the program with one line where
// the limit on addresses (ulimit -v) leaves no room for them: some of NVIDIA's do not look whether they got memory. And it sees to
// it that an exception that nothing catches, in one of LibTorch's threads perhaps, ends the program with one line as well.

}  // namespace sidestream::cli
