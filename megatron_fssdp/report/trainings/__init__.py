"""What pages and tables say about recorded runs: one run, a comparison, a sweep."""
