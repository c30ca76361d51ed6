"""Stopwatches of layers, and the times of passes."""
