"""SparseAllGather, SparseReduceScatter, exchanges of rows and slots, and the plan agreement check."""
