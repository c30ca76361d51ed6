"""Logs one line about where and why a training stopped, and from which checkpoint it can resume.

Megatron refuses a non-finite loss or gradient. :class:`FiniteWatch` then finds the MoE layer in which NaN or
infinity appeared. The input and output of each layer are summed, and 0 times the sum is added to a mark on
the device, which becomes NaN for non-finite numbers. This costs four small kernels for each layer and no
synchronization. Megatron's combined schedule (``--overlap-moe-expert-parallel-comm``) does not call a layer's
hooks, so that only gradients are looked at.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer

logger = logging.getLogger(__name__)

_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron writes this file when a checkpoint is complete.


@contextmanager
def reporting_stop(args: Any) -> Iterator[None]:
    """Log one line if the code inside this context raises; the error is then raised again."""
    try:
        yield
    except Exception as error:
        places = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        reason = (str(error).strip() or "no message").splitlines()[0]
        logger.error(
            f"[fssdp] rank {dist.get_rank()} stopped in iteration {_running_iteration(args)}{places}: "
            f"{type(error).__name__}: {reason}. If another rank stopped earlier, its log has the cause. "
            f"{how_to_go_on(args)}"
        )
        raise


def _running_iteration(args: Any) -> int:
    return int(args.curr_iteration) + 1  # as in Megatron's log


def how_to_go_on(args: Any) -> str:
    """Return a sentence that names the checkpoint from which the training can resume."""
    for folder in filter(None, (args.save, args.load)):
        with suppress(OSError, ValueError):  # A damaged file must not hide why the training stopped.
            iteration = (Path(folder) / _TRACKER).read_text().strip()
            return f"The last complete checkpoint is of iteration {iteration}: restart with --load {folder}"
    return "No checkpoint has been completed: set --save and --save-interval to be able to resume"


class FiniteWatch:
    """Watches the hidden states that enter and leave the MoE layers of this rank's model chunks."""

    def __init__(self, model: Iterable[torch.nn.Module]) -> None:
        layers = [m for chunk in model for m in chunk.modules() if isinstance(m, StrategyMoELayer)]
        self._layers = sorted(layers, key=_number)
        self._marks_L2: torch.Tensor | None = None  # what enters, what leaves
        for index, layer in enumerate(self._layers):
            layer.register_forward_hook(partial(self._watch_layer, index), with_kwargs=True)

    def clear(self) -> None:
        """Clear all marks. Call this before an iteration."""
        if self._marks_L2 is not None:
            self._marks_L2.zero_()

    def report(self, args: Any) -> None:
        """Log where NaN or infinity appeared first since :meth:`clear`, if so; it waits for the device."""
        finding = self._finding_in_forward() or self._finding_in_gradients()
        if finding is None and get_rerun_state_machine().rerun_requested:
            finding = "all MoE layers of this rank made finite hidden states and gradients: check the others"
        if finding is not None:
            logger.error(
                f"[fssdp] error on rank {dist.get_rank()}: iteration {_running_iteration(args)}: {finding}. "
                f"{how_to_go_on(args)}"
            )

    def _watch_layer(
        self, index: int, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        entered = args[0] if args else kwargs["hidden_states"]
        if self._marks_L2 is None:
            self._marks_L2 = torch.zeros(len(self._layers), 2, device=entered.device)
        for mark, hidden in zip(self._marks_L2[index], (entered, output[0]), strict=True):
            mark.add_(hidden.detach().sum(dtype=torch.float32), alpha=0)

    def _finding_in_forward(self) -> str | None:
        if self._marks_L2 is None:
            return None
        for layer, (entered, left) in zip(self._layers, self._marks_L2.isnan().tolist(), strict=True):
            number = _number(layer)
            if entered:
                return (
                    f"the hidden states were already non-finite at the input of MoE layer {number}: check "
                    "the layers between it and the MoE layer before"
                )
            if left:
                experts = layer.slot_layer.experts.parameters
                bad = [expert for expert, parameters in experts.items() if not _are_finite(parameters)]
                owned = f"; parameters of its experts {bad}, which this rank owns, are not finite"
                return (
                    f"MoE layer {number} made non-finite hidden states from finite ones{owned if bad else ''}"
                )
        return None

    def _finding_in_gradients(self) -> str | None:
        for layer in reversed(self._layers):
            experts = chain.from_iterable(layer.slot_layer.experts.parameters.values())
            gradients = (
                getattr(parameter, "main_grad", parameter.grad)
                for parameter in chain(layer.router.parameters(), experts)
            )
            if not _are_finite(gradient for gradient in gradients if gradient is not None):
                return (
                    f"MoE layer {_number(layer)} is the last one with non-finite gradients: check this layer "
                    "and the layers after it"
                )
        return None


def _number(layer: StrategyMoELayer) -> int:
    return layer.slot_layer.context.layer


def _are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors)
