"""Rows of FasterMoE: the statements of its text, and its systems."""
