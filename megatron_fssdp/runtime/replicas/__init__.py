"""Replicas on this rank: weights that arrive, gradients that return to the owners, and autograd nodes."""
