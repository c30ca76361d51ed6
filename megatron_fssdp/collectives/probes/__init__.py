"""Measurements of links and collectives."""
