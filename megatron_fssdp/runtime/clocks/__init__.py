"""Clocks of an iteration and of its layers: moments on a device, stopwatches, and the times of passes."""
