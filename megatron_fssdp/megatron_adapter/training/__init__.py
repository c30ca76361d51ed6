"""What only Megatron-LM's own training loop needs: lines on its end and on failures."""
