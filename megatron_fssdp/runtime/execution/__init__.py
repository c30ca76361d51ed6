"""Carries out plans: layer executors, iterations, profiling, and the runtime of a model."""
