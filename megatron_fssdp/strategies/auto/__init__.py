"""The ``auto`` strategy: it selects a strategy for every layer by modelled seconds."""
