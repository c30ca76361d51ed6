"""What pages and tables say about simulations, and the loads that are simulated."""
