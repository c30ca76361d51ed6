"""Checks a node with GPUs from start to end, and writes one page and one zip for a bug report."""
