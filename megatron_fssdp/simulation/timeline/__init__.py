"""Lanes of a simulated device, and the work that is put on them."""
