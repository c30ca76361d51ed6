"""The HTML page of a simulation: its result in one sentence, its sections and what it assumes."""
