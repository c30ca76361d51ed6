"""The profiler of a cluster."""
