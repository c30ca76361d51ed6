"""Which planner, planned from what, when weights move: one small file a strategy."""
