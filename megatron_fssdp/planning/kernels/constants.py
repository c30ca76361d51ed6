# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: infer_types=True, annotation_typing=False
"""The numbers of the kernels; none of them depends on a machine."""

# Parts of the mean load that owners keep in seeds, between 0.82 and 0.12. The low ones need many slots.
HIGHEST_LEVEL = 0.82
LEVEL_STEP = 0.14
NUM_LEVELS = 6
# Experts of the busiest device, and of the busiest link, that one step of a descent looks at. More of them
# take longer and find little more.
WIDTH = 3
# Prices of all kicks, times the number of experts: small layers need more kicks, and their prices are quick.
KICK_PRICES = 20000
# Part of a price below which a difference is rounding.
ROUNDING = 1e-9
# Most experts of a link whose transfers cost nothing in a descent.
MOST_FREE = 64
# Part of all pairs below which the traffic of a link is the rounding error of a difference.
NO_PAIRS = 1e-12
# Part of a sum of eighth powers below which its rest after a subtraction is added up again.
LEAST_LEFT = 1e-6
# Bits of a number of hops inside a node, which is at most the logarithm of the devices.
HOP_BITS = 6
# Price of a trial that is left out.
NO_PRICE = 1e300
