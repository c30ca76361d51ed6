"""A testbed: a cluster with links of limited rate on one machine, and stacks of MoE layers that run on it."""
