"""Run code on gloo ranks in milliseconds, and Megatron's parallel state on them."""
