"""Processes of ranks that a command starts, and what it shows of them."""
