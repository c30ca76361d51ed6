"""The files in which a run records what it did, and their readers."""
