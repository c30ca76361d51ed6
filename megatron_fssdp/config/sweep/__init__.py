"""Sweeps: one YAML that describes many runs."""
