"""Supported Megatron versions, features and machines; what is refused, with the reason."""
