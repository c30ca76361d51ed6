"""Everything that touches Megatron: arguments, specs, layer, gradients, launcher, CPU runtime."""

KEEP_OWNERS = "use fssdp with reshard_interval=0"
"""Advice in error messages for setups in which owners cannot be moved."""
