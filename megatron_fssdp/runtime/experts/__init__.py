"""The layout of an expert's weights, and a measurement of how fast a device computes."""
