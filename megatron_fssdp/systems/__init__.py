"""Systems of others, which are simulated beside the strategies and never train."""
