// For libraries that only exist for their precompiled headers, and programs that are linked from libraries alone.
