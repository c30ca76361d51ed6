"""Counts of a forward pass's host work on a virtual CUDA device; ``benchmarks/host_work.py`` prints them."""
