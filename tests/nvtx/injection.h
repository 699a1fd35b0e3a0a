#pragma once
#include <cstddef>

// What the injection library records of the domain "sidestream", read by the test that has it loaded. A line is a range's name
// after two spaces for each range it lies in, in the order of the pushes; a pop without a push is the line "unmatched pop".

extern "C" {
/// Number of lines so far.
std::size_t sidestream_nvtx_lines();
/// Line `index`; lives as long as the process.
const char* sidestream_nvtx_line(std::size_t index);
/// Ranges now open on the calling thread.
std::size_t sidestream_nvtx_depth();
}
