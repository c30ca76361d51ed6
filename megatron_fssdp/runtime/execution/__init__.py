"""Carries out plans: layer executors, iterations, measurements, and the runtime of a model."""
