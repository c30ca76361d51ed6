"""Commands that read records or simulate: ``simulate``, ``roofline``, ``report`` and ``compare``."""
