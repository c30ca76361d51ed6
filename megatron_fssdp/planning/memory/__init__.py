"""How many bytes experts and their replicas take, for how long, and how many replicas fit."""
