"""Pages, tables and traces that show recorded runs, comparisons and simulations."""
