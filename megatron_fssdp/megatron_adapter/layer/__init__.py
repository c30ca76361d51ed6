"""Megatron's MoE layer under a strategy: the layer, its dispatcher, its hooks and the session."""
