"""How many bytes experts and their replicas take, how long replicas live, and how many replicas fit."""
