// The libraries that only exist for their precompiled headers.
