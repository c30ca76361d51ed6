"""Commands that prepare, start and continue trainings: ``data build``, ``train`` and ``sweep``."""
