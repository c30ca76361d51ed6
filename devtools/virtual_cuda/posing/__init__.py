"""Lets CPU tensors, streams and functions of ``torch.cuda`` pose as those of the virtual device."""
