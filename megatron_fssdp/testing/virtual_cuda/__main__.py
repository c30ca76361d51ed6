"""``python -m megatron_fssdp.testing.virtual_cuda``: runs a program on a virtual CUDA device."""

import sys

from megatron_fssdp.testing.virtual_cuda.programs.launcher import main

if __name__ == "__main__":
    main(sys.argv[1:])
