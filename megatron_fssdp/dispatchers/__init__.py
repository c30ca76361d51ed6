"""Optional dispatchers over slots, for Megatron's MoE layer."""
