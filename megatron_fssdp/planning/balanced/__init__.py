"""Our own planners: a placement search, its price in seconds, and exact quotas."""
