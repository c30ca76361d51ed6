"""Everything that touches Megatron: arguments, specs, layer, gradients, launcher, CPU runtime."""
