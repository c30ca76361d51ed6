"""What happens around Megatron's training loop: iterations, records, memory and failures."""
