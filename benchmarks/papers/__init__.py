"""Settings and statements of the papers, which ``benchmarks/reproduce_papers.py`` prints."""
