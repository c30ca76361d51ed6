"""Load-balanced MoE training strategies for stock Megatron-LM."""
__version__ = "0.1.0"
