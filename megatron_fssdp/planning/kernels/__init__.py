"""Kernels: the inner loops of planning, each one source that runs compiled or as plain Python."""
