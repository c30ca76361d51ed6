"""Commands about a machine or a cluster: ``doctor`` and ``profile``."""
