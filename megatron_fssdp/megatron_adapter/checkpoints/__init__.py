"""Checkpoints that can be loaded under any strategy, and copies of weights by name."""
