"""Settings of strategies: their keys, the table of all strategies, and how a strategy is selected."""
