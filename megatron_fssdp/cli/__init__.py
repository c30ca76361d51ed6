"""The commands of ``megatron-fssdp``."""
