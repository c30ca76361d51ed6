"""``python -m devtools.virtual_cuda``: runs a program on a virtual CUDA device."""

import sys

from devtools.virtual_cuda.programs.launcher import main

if __name__ == "__main__":
    main(sys.argv[1:])
