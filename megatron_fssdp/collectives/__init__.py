"""SparseAllGather, SparseReduceScatter, uneven all-to-all and the plan agreement check."""
