"""A cluster with shaped links on one machine, and MoE layer stacks that run across it."""
