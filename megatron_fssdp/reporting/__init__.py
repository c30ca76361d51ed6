"""File formats of a run's records, and the tables, plots and pages that show them."""
