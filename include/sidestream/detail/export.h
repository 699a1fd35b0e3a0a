#pragma once

/// Exports a symbol from the shared libraries. All others are hidden.
#define SIDESTREAM_API [[gnu::visibility("default")]]
