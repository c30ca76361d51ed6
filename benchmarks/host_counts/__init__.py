"""What the host does in a forward pass, counted on a virtual device (``benchmarks/host/host_work.py``)."""
