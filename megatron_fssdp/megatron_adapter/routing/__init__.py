"""Changes to Megatron's router: the topology-aware gate, and tokens that tensor-parallel ranks share."""
