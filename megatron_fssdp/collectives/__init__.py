"""Communicates along a plan: experts, gradients, rows of tokens, contents of slots, and measurements."""
