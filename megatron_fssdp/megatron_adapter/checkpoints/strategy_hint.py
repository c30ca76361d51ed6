"""The strategies that ``auto`` has selected, in a checkpoint: a hint with which a resumed run keeps them."""

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
    """The strategy that ``auto`` has selected for every layer, as a :class:`CheckpointHint`.

    Args:
        strategy: Strategy that selects other strategies (``auto``).
        layers: Function that returns Megatron's numbers of this pipeline stage's MoE layers. It is called
            only after the model is built.
    """

    key = HINT_KEY

    def __init__(self, strategy: Strategy, layers: Callable[[], Sequence[int]]) -> None:
        self._strategy = strategy
        self._layers = layers

    def gather(self) -> dict[str, str]:
        """Return the selected strategy's name by layer number (as text), for all pipeline stages."""
        named = {layer: self._strategy.selected(layer) for layer in self._layers()}
        own = {str(layer): name for layer, name in named.items() if name is not None}
        group = parallel_state.get_pipeline_model_parallel_group()
        stages: list[dict[str, str]] = [{}] * group.size()
        dist.all_gather_object(stages, own, group=group)
        return {layer: name for stage in stages for layer, name in stage.items()}

    def take(self, hint: Any, metadata: Mapping[str, Any]) -> None:
        """Continue with the saved selection, whatever the layout of the run that saved it was.

        Args:
            hint: Result of :meth:`gather` in the run that saved the checkpoint. It may be damaged.
            metadata: Megatron's content metadata of the checkpoint.
        """
        try:
            selected = {int(layer): str(name) for layer, name in hint.items()}
        except (AttributeError, TypeError, ValueError) as error:
            log_single_rank(
                logger,
                logging.WARNING,
                "[fssdp] the checkpoint's selection of strategies is not used because it cannot be read "
                f"({type(error).__name__}: {error}); auto selects again",
            )
            return
        self._strategy.resume(selected)
        log_single_rank(logger, logging.INFO, "[fssdp] layers keep the strategies of the checkpoint")
