"""Entry point of ``python -m megatron_fssdp``.

``python -m megatron_fssdp SCRIPT.py ARGS…`` or ``… -m MODULE ARGS…`` runs a training with the plugin (see
``megatron_adapter.entry.launcher``). ``python -m megatron_fssdp profile ARGS…`` and ``… doctor ARGS…`` run
the commands of those names on ranks that torchrun starts. ``--help`` and ``--version`` answer at once.
"""

import sys

_HELP = """usage: torchrun … -m megatron_fssdp SCRIPT.py|-m MODULE ARGS… [--moe-strategy NAME]

Runs an unmodified training script or module of any host on megatron-core with the plugin's strategies.
Scripts of Megatron-LM get --moe-strategy. Others read MEGATRON_FSSDP_STRATEGY=NAME and
MEGATRON_FSSDP_SETTINGS=slots=2,… . Without a path and a suffix, pretrain_gpt and pretrain_bert are the
scripts that come with the package.
  arguments of the script and of the plugin:  python -m megatron_fssdp SCRIPT.py --help
  all commands (train, report, simulate, …):  megatron-fssdp --help
  on the ranks of torchrun:                   torchrun … -m megatron_fssdp profile|doctor ARGS…"""

if __name__ == "__main__":
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(_HELP)
    elif sys.argv[1:2] in (["profile"], ["doctor"], ["--version"]):
        from megatron_fssdp.cli import main

        main()
    else:
        from megatron_fssdp.megatron_adapter.entry.launcher import launch

        launch(sys.argv[1:])
