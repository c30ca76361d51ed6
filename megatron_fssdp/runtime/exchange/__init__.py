"""How rows of tokens travel to the experts and back, in each order of collectives."""
