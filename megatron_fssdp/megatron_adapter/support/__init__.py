"""Supported versions and features of Megatron, and machines; what is refused, with the next step."""
