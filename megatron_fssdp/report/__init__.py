"""Pages, tables and traces that show recorded runs, comparisons, sweeps and simulations."""
