"""File formats of a run's records and the pictures drawn from them."""
