"""How many tokens each expert gets: history of counts, statistics and forecasts."""
