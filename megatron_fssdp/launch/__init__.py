"""A run on this machine: its options, folder and data; its ranks, their progress, and why they failed."""
