"""Fully sharded sparse data parallelism (Hecate)."""
