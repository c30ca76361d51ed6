"""Settings and relations of the papers, for ``benchmarks/reproduce_papers.py``."""
