"""Rows of Hecate: the statements of its text, its systems and the simulated values."""
