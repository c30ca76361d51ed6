"""Placements, loads, topology, costs and the papers' planning algorithms; numpy only."""
