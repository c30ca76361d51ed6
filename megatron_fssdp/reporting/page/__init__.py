"""The HTML page that shows recorded runs: its sections, their figures, and the template around them."""
