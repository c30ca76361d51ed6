"""Commands that read records or simulate: ``simulate``, ``report`` and ``compare``."""
