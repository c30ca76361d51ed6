"""Process groups that report NCCL, and its order of operations on streams; gloo moves the data."""
