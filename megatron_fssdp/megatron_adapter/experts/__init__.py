"""Experts' Parameters, gradients and optimizer states in Megatron, and how they move."""
