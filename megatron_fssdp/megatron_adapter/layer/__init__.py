"""Megatron's MoE layer under a strategy: the layer, its dispatcher, its hooks and the strategy's session."""
