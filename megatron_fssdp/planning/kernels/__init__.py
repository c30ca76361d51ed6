"""Everything of planning that loops over experts and devices: the only compiled files.

They are Python in Cython's pure-Python mode; the ``.pxd`` files have the types. An installation with a C
compiler makes extension modules of them. Without one, Python runs the files themselves, about a hundred times
slower and with equal results (``compiled_form.py``). Arrays are in C order: int64 for whole numbers, float64
for others. Indexes are not checked, so they are never negative. Sums are added in a fixed order, and the
compiler may not contract ``a * b + c``: all ranks, in both forms, must find the same placements.

::

    TransferTrees <- PricedLayer <- PlacementDescent <- PlacementSearch
                           |
                      PriceFormula

Shape letters: D devices, E experts, N nodes, P pairs of expert and device.
"""
