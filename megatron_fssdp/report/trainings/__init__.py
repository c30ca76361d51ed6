"""What pages and tables say about recorded runs: one run, or a comparison."""
