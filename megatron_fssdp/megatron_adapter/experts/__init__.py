"""Experts' Parameters, gradients and optimizer states in Megatron, how they move, and copies by name."""
