"""Runs whole programs on virtual devices, among them Megatron's training loop."""
