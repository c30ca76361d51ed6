"""How many tokens each expert gets: the history of counts and device loads under even dispatch."""
