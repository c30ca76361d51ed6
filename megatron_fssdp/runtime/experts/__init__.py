"""How experts compute: the layout of their weights, activations, grouped GEMMs and their speed."""
