"""Exchange of token rows: to the experts and back, in each order of collectives."""
