"""How weights travel from owners to replicas, device to device; gradients take the same way back."""
