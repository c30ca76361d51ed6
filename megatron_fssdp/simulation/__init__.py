"""Simulates strategies on described clusters, with recorded or generated loads of experts."""
