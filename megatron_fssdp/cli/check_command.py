"""``megatron-fssdp check``: checks the command of a training, and starts nothing."""

import os
import re
from pathlib import Path
from typing import NoReturn

import typer

from megatron_fssdp.config.errors import ConfigurationError

_WANTED = (
    "wanted the command of a training: megatron-fssdp check -- torchrun … [-m megatron_fssdp] SCRIPT.py ARGS…"
)
_OTHERS = (
    "wanted a script with Megatron-LM's arguments; the ranks of other programs check themselves, before they "
    "train"
)
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def check_command(context: typer.Context) -> None:
    """Check the torchrun command of a script of Megatron-LM: arguments, strategy, devices. Nothing starts."""
    from torch.distributed.run import determine_local_world_size, get_args_parser

    from megatron_fssdp.config.run.megatron_options import quiet_output
    from megatron_fssdp.megatron_adapter.entry.launcher import shipped_scripts

    words: list[str] = context.obj or []
    at = next((at for at, word in enumerate(words) if Path(word).name in _LAUNCHERS), None)
    if at is None:
        raise ConfigurationError(f"check: got {' '.join(words) or 'nothing after --'}, {_WANTED}")
    # Variables before the command apply to it.
    os.environ.update(dict(word.split("=", 1) for word in words[:at] if re.match(r"\w+=", word)))
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    options = parser.parse_args(words[at + 1 :])
    try:
        ranks = int(determine_local_world_size(options.nproc_per_node))
    except ValueError as error:
        raise ConfigurationError(
            f"--nproc-per-node {options.nproc_per_node}: {error}; give the number of ranks of a node"
        ) from None
    script, arguments = options.training_script, list(options.training_script_args)
    by_launcher = options.module and script == "megatron_fssdp"
    if by_launcher:
        if not arguments:
            raise ConfigurationError(f"check: got no script after -m megatron_fssdp, {_WANTED}")
        script = arguments.pop(0)
    path = shipped_scripts().get(script, Path(script))
    if script == "-m":
        raise ConfigurationError(f"check: got module {' '.join(arguments[:1])}, {_OTHERS}")
    if not path.is_file():
        raise ConfigurationError(f"check: script {script}: no such file; {_WANTED}")
    text = path.read_text(encoding="utf-8", errors="replace")
    if "megatron.training" not in text and "--num-layers" not in arguments:
        raise ConfigurationError(f"check: got {script}, which is not of Megatron-LM, {_OTHERS}")
    if not by_launcher and "megatron_fssdp" not in text:
        raise ConfigurationError(
            f"check: got {script} without the plugin; put -m megatron_fssdp before it, or patch it"
        )
    with quiet_output():
        from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
        from megatron_fssdp.megatron_adapter.entry.argument_check import check_arguments

    on_cpu = cpu_runtime.requested()
    world_size = int(str(options.nnodes).rpartition(":")[2]) * ranks
    strategy = check_arguments(arguments, world_size, on_cpu=on_cpu, ranks_here=ranks, script_text=text)
    where = f"under {strategy} on {world_size} {'CPU' if on_cpu else 'GPU'} ranks"
    print(f"OK: {script} can start {where}; the model and the data were not built")


def _refuse(message: str) -> NoReturn:
    raise ConfigurationError(f"check: torchrun refuses its options: {message}")
