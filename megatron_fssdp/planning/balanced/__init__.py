"""Our own planners: the replica search with its costs, and exact quotas."""
