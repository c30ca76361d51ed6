"""What happens in and between the iterations of a model, in any training loop on megatron-core."""
