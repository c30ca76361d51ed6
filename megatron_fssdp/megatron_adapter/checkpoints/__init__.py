"""Checkpoints that load under any strategy, and repairs of Megatron's own checkpoint code."""
