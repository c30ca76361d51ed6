"""Types of numbers and arrays in kernels.

Cython reads ``kernel_types.pxd`` in place of this module. It gives each name its C type. Arrays are numpy
arrays in C order for the caller of a kernel. Inside a kernel they are C arrays, or memoryviews in plain
Python.
"""

from typing import Any

type Int = int
"""A whole number of 64 bits."""

type Index = int
"""A position in an array, or a length."""

type Real = float
"""A float of 64 bits."""

type Flag = bool
"""True or false."""

type Ints = Any
"""An int64 array with one dimension."""

type Ints2 = Any
"""An int64 array with two dimensions."""

type ReadInts = Any
"""An int64 array with one dimension that is only read. The caller's array may be read-only."""

type ReadInts2 = Any
"""An int64 array with two dimensions that is only read."""

type ReadBytes2 = Any
"""A uint8 array with two dimensions that is only read, such as a view of flags."""

type Reals = Any
"""A float64 array with one dimension."""

type Reals2 = Any
"""A float64 array with two dimensions."""

type ReadReals = Any
"""A float64 array with one dimension that is only read."""

type ReadReals2 = Any
"""A float64 array with two dimensions that is only read."""
