"""From text files to Megatron's indexed token data."""
