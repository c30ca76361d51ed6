"""The command that starts a run's ranks, on this machine or on others."""

import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.megatron_arguments import Installation, megatron_arguments
from megatron_fssdp.config.run.megatron_options import quiet_output
from megatron_fssdp.config.run.run_config import RunConfig

_DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"


@dataclass(frozen=True)
class RankCommand:
    """Arguments and environment of the ranks of a run, on CPUs or GPUs."""

    config: RunConfig
    megatron_arguments: list[str]  # of the pretraining script
    on_cpu: bool

    def check(self, is_here: bool) -> None:
        """Raise a ConfigurationError if ranks, on this machine or on others, would refuse the arguments."""
        with quiet_output():
            from megatron_fssdp.megatron_adapter.entry.argument_check import check_arguments

        cut = self.config.parallelism
        ranks_here = cut.nproc_per_node if is_here else None
        check_arguments(self.megatron_arguments, cut.world_size, on_cpu=self.on_cpu, ranks_here=ranks_here)

    def variables(self) -> dict[str, str]:
        """Environment variables of the ranks."""
        if self.on_cpu:  # The arguments are those of CPU ranks, on every machine. The ranks share the cores.
            # To compile Megatron's small functions takes longer than they run in most trainings.
            return {_DEVICE_VARIABLE: "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        device, cut = self.config.training.device, self.config.parallelism
        variables: dict[str, str] = {} if device == "auto" else {_DEVICE_VARIABLE: device}
        if cut.tensor_model_parallel_size > 1 or cut.context_parallel_size > 1:
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron needs it to order its kernels
        return variables

    def environment(self) -> dict[str, str]:
        """The variables that ranks on this machine need; those of this process win, but for the device."""
        taken = os.environ.keys() - {_DEVICE_VARIABLE}
        return {name: value for name, value in self.variables().items() if name not in taken}

    def local(self, log_dir: Path) -> list[str]:
        """Return the command line for this machine; torchrun copies output into the temporary ``log_dir``."""
        ranks = f"--nproc-per-node={self.config.parallelism.nproc_per_node}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks]
        # --tee marks each line with its rank, by which a failure is explained.
        return [*torchrun, "--tee=3", f"--log-dir={log_dir}", *self._program()]

    def shell_text(self) -> str:
        """Return the command as shell text, to type on this machine or on every machine of a cluster."""
        cut = self.config.parallelism
        nodes = "--standalone" if cut.num_nodes == 1 else f"--nnodes={cut.num_nodes}"
        words = [*(f"{name}={value}" for name, value in self.variables().items()), "torchrun", nodes]
        words.append(f"--nproc-per-node={cut.nproc_per_node}")
        if cut.num_nodes > 1:
            words += ["--rdzv-backend=c10d", '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"']
        lines = [" ".join(words)]
        for word in self._program():
            if word.startswith("--"):
                lines.append(shlex.quote(word))
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n  ".join(lines)

    def _program(self) -> list[str]:
        return ["-m", "megatron_fssdp", f"pretrain_{self.config.model.family}", *self.megatron_arguments]


def rank_command(config: RunConfig, data: Mapping[str, Any], out_dir: Path, resume: bool) -> RankCommand:
    """Return the command of a run on ``data``, Megatron's arguments that name it."""
    import torch

    training, cut, has_gpus = config.training, config.parallelism, torch.cuda.is_available()
    asked = training.device if training.device != "auto" else os.environ.get(_DEVICE_VARIABLE, "")
    on_cpu = asked.lower() == "cpu" if asked else not has_gpus
    if on_cpu and cut.context_parallel_size > 1:
        raise ConfigurationError(
            f"parallelism.context_parallel_size {cut.context_parallel_size} needs Transformer Engine's "
            "attention, which does not run on CPUs; set it to 1 or train on GPUs"
        )
    has_te = training.transformer_engine
    if has_te is None:
        # A machine without GPUs only prints the command, so what it has installed says nothing about others.
        has_te = not has_gpus or importlib.util.find_spec("transformer_engine") is not None
    has_apex = not has_gpus or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    installation = Installation(on_cpu, has_te and not on_cpu, has_apex)
    return RankCommand(config, megatron_arguments(config, data, installation, out_dir, resume), on_cpu)
