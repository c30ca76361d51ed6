"""Settings of a training run: its YAML files, and Megatron's arguments that they become."""
