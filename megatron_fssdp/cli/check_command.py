"""``megatron-fssdp check``: checks the command of a training, and starts nothing."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from megatron_fssdp.config.errors import ConfigurationError

_WANTED = (
    "wanted the command of a training: megatron-fssdp check -- torchrun … [-m megatron_fssdp] SCRIPT.py ARGS…"
)
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def check_command(context: typer.Context) -> None:
    """Check the torchrun command of a training: arguments, strategy and devices. Nothing starts."""
    from megatron_fssdp.config.quiet_output import quiet_output
    from megatron_fssdp.config.shipped_files import shipped_scripts

    options = _torchrun_options(context.obj or ())
    ranks, arguments = _ranks_here(options.nproc_per_node), list(options.training_script_args)
    script = options.training_script
    if options.module and script == "megatron_fssdp":
        if not arguments:
            raise ConfigurationError(f"check: got no script after -m megatron_fssdp, {_WANTED}")
        script = arguments.pop(0)
    path = shipped_scripts().get(script, Path(script))
    if not path.is_file():
        raise ConfigurationError(f"check: script {script}: no such file; {_WANTED}")
    with quiet_output():
        from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
        from megatron_fssdp.megatron_adapter.entry.argument_check import check_arguments

    on_cpu = cpu_runtime.requested()
    text = path.read_text(encoding="utf-8", errors="replace")
    nodes = int(str(options.nnodes).rpartition(":")[2])
    check_arguments(arguments, nodes * ranks, on_cpu=on_cpu, ranks_here=ranks, script_text=text)
    where = "CPU" if on_cpu else "GPU"
    print(f"OK: {script} can start on {nodes * ranks} {where} ranks; the model and the data were not built")


def _torchrun_options(words: Sequence[str]) -> Any:
    """Return the parsed options of torchrun, with the script and its arguments; apply variables before it."""
    at = next((at for at, word in enumerate(words) if Path(word).name in _LAUNCHERS), None)
    if at is None:
        raise ConfigurationError(f"check: got {' '.join(words) or 'nothing after --'}, {_WANTED}")
    for word in words[:at]:
        if re.match(r"\w+=", word):
            name, _, value = word.partition("=")
            os.environ[name] = value
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    return parser.parse_args(list(words[at + 1 :]))


def _refuse(message: str) -> NoReturn:
    raise ConfigurationError(f"check: torchrun refuses its options: {message}")


def _ranks_here(asked: str) -> int:
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(asked))
    except ValueError as error:
        raise ConfigurationError(
            f"--nproc-per-node {asked}: {error}; give the number of ranks of a node"
        ) from None
