"""Checkpoints that can be loaded under any strategy."""
