#pragma once

/// Marks what a program that links the shared libraries may use; all else is hidden in them.
#define SIDESTREAM_API [[gnu::visibility("default")]]
