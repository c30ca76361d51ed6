"""Replicas on this rank: weights that arrive, gradients that go home, their place in autograd."""
