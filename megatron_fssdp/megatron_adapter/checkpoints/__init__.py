"""Checkpoints that can be loaded under any strategy, and repairs of Megatron's own checkpoint code."""
