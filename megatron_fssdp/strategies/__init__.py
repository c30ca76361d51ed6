"""The strategies: which planner each of them asks, from which loads, and when weights move."""
