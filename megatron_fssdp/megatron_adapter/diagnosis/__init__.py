"""Checks of ``doctor``, which continue if torch or Megatron is missing, and the profiler of a cluster."""
