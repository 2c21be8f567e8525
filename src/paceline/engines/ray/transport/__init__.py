"""Transport of slices between processes: through Ray's object stores, or directly over TCP."""
