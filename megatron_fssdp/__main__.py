"""``python -m megatron_fssdp SCRIPT.py ARGS…``: see ``megatron_adapter.launcher``."""

import sys

from megatron_fssdp.megatron_adapter.launcher import launch

if __name__ == "__main__":
    launch(sys.argv[1:])
