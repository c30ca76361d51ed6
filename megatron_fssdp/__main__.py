"""Entry point of ``python -m megatron_fssdp``.

``python -m megatron_fssdp SCRIPT.py ARGS…`` runs a training script with the plugin (see
``megatron_adapter.entry.launcher``). ``python -m megatron_fssdp profile ARGS…`` and ``… doctor ARGS…`` run
the commands of those names on ranks that torchrun starts.
"""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] in (["profile"], ["doctor"]):
        from megatron_fssdp.cli.app import main

        main()
    else:
        from megatron_fssdp.megatron_adapter.entry.launcher import launch

        launch(sys.argv[1:])
