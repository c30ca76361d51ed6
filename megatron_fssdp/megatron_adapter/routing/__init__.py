"""Changes to Megatron's router: the topology-aware gate, and tokens shared by ranks."""
