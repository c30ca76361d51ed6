"""What every layer has chosen under ``auto``, in a checkpoint: a hint to go on with."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import log_single_rank

from megatron_fssdp.strategies.strategy import Strategy

logger = logging.getLogger(__name__)

HINT_KEY = "megatron_fssdp_choices"


class StrategyHint:
    """The choices of a strategy that makes some.

    Args:
        strategy: Chooses.
        layers: Numbers of this pipeline stage's layers; the model is built when they are looked at.
    """

    key = HINT_KEY

    def __init__(self, strategy: Strategy, layers: Callable[[], Sequence[int]]) -> None:
        self._strategy = strategy
        self._layers = layers

    def gather(self) -> dict[str, str]:
        """Names by layer number, as text, of all pipeline stages."""
        named = {layer: self._strategy.selected(layer) for layer in self._layers()}
        own = {str(layer): name for layer, name in named.items() if name is not None}
        group = parallel_state.get_pipeline_model_parallel_group()
        stages: list[dict[str, str]] = [{}] * group.size()
        dist.all_gather_object(stages, own, group=group)
        return {layer: name for stage in stages for layer, name in stage.items()}

    def take(self, hint: Any, metadata: Mapping[str, Any]) -> None:
        """Start with the saved choices, whatever the layout of the run that saved them was."""
        try:
            chosen = {int(layer): str(name) for layer, name in hint.items()}
        except (AttributeError, TypeError, ValueError) as error:
            log_single_rank(
                logger,
                logging.WARNING,
                f"[fssdp] the checkpoint's choices of strategies are not used: they cannot be read ({error})",
            )
            return
        self._strategy.resume(chosen)
        log_single_rank(logger, logging.INFO, "[fssdp] layers go on with the strategies of the checkpoint")
