"""The strategies, one small file for each: which planner it asks, from which loads, and when weights move."""
