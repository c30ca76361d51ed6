"""SparseAllGather and SparseReduceScatter along a transfer plan, and the exchange of slots."""
