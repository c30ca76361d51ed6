"""Communication of the plugin.

SparseAllGather and SparseReduceScatter move experts and their gradients. Other collectives exchange rows of
tokens or the contents of expert slots. A check compares the plans of the ranks.
"""
