"""Patches that let Megatron train on machines without an accelerator."""
