"""How weights travel from owners to replicas, device to device. Gradients take the same way back."""
