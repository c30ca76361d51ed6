"""The page of HTML that shows recorded runs: sections, their figures, and the template that holds them."""
