"""Which device computes which tokens, for a given placement and given counts."""
