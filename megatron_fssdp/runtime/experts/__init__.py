"""Expert compute: the layout of weights, activations, grouped GEMMs and a measurement of their speed."""
