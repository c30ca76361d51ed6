"""Our own planners: a search for placements, placements by modelled seconds, and exact quotas."""
