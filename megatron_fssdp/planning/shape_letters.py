"""The letters that name the axes of arrays and tensors, in the whole package.

A name such as ``counts_DE`` ends with the letters of its axes: one row for each device, one column for
each expert. Shapes in docstrings use the same letters: ``[D, E]``. A legend in a module's docstring ("Shape
letters: …") repeats the part of this table that the module needs.
"""

SHAPE_LETTERS = {
    "A": "rows that a rank sends",
    "B": "bins",
    "C": "candidate strategies",
    "D": "devices",
    "E": "experts",
    "F": "FFN dimension",
    "G": "experts present on a device",
    "H": "selected experts of a layer",
    "I": "iterations",
    "J": "rows of a share table",
    "K": "choices per token",
    "L": "MoE layers",
    "M": "model dimension",
    "N": "nodes",
    "O": "Parameters of an expert",
    "P": "pairs of expert and device",
    "Q": "elements of a piece",
    "R": "rows that a rank receives",
    "S": "ranks that send rows",
    "T": "tokens",
    "U": "slots of a device",
    "V": "model chunks of a pipeline stage",
    "W": "slots",
    "X": "expert-tensor-parallel peers",
    "Y": "tensor-parallel ranks",
}
"""Axis that each letter means. A row is one assignment: a token and one expert that it selected."""
