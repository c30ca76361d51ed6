"""What only Megatron-LM's own training loop needs: evaluations in records, and lines on failures."""
