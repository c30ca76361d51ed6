"""Runs the planning kernels: compiled if an installation compiled them, otherwise as plain Python."""
