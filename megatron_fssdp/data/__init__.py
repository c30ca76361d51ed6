"""Builds Megatron's indexed token data from text files."""
