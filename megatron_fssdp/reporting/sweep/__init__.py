"""The page and the figures of a sweep: runs that are repeated, with their spread."""
