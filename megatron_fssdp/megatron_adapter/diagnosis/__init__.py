"""Checks of ``megatron-fssdp doctor``, and the profiler of a cluster.

If torch or Megatron is missing or broken, the checks continue: this is a finding too.
"""
