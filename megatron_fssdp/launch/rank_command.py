"""The command that starts a run's ranks."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.config.run.run_config import RunConfig

DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"


@dataclass(frozen=True)
class RankCommand:
    """Command and environment that start the ranks of a run on CPUs or GPUs."""

    config: RunConfig
    megatron_arguments: Sequence[str]  # of the pretraining script
    on_cpu: bool

    def environment(self) -> dict[str, str]:
        """Environment variables that the ranks need in addition to those of this process."""
        return {
            name: value
            for name, value in self._variables().items()
            if name not in os.environ or name == DEVICE_VARIABLE
        }

    def _variables(self) -> dict[str, str]:
        device = self.config.training.device
        variables: dict[str, str] = {} if device == "auto" else {DEVICE_VARIABLE: device}
        if self.on_cpu:
            variables[DEVICE_VARIABLE] = "cpu"  # the arguments are those of CPU ranks, on every machine
            variables["OMP_NUM_THREADS"] = "1"  # the ranks share the cores
        else:
            cut = self.config.parallelism
            if cut.tensor_model_parallel_size > 1 or cut.context_parallel_size > 1:
                variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron needs it to order its kernels
            if self.config.strategy.name != "none":
                # Transfers and dispatch use two communicators at the same time. NCCL's documentation asks
                # for this setting in such programs, from NCCL 2.26 on. Older versions ignore it.
                variables["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
        return variables

    def local(self, log_dir: Path) -> list[str]:
        """Return the command line for this machine. torchrun marks each output line with its rank.

        ``log_dir`` is a temporary folder for torchrun's own copies of the output.
        """
        ranks = f"--nproc-per-node={self.config.parallelism.nproc_per_node}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks]
        return [*torchrun, "--tee=3", f"--log-dir={log_dir}", *self._program()]

    def shell_text(self) -> str:
        """Return the command as shell text, to type on this machine or on every machine of a cluster."""
        cut = self.config.parallelism
        words = [f"{name}={value}" for name, value in self._variables().items()]
        if cut.num_nodes == 1:
            words += ["torchrun", "--standalone", f"--nproc-per-node={cut.nproc_per_node}"]
        else:
            words += ["torchrun", f"--nnodes={cut.num_nodes}", f"--nproc-per-node={cut.nproc_per_node}"]
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
