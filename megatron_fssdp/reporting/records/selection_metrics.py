"""What ``auto`` decided and what its last change saved, in a run's records."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from megatron_fssdp.config.json_records import Count

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Difference = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class SeenGain:
    """The last change of strategies, checked with the iterations since.

    Attributes:
        predicted_s: Modelled seconds that the change should save in an iteration.
        before_s: Median seconds of the iterations before the change.
        after_s: Median seconds of the iterations since the change. The loads can also have changed.
        is_slower: Whether iterations clearly take longer, so that the change is taken back.
    """

    predicted_s: _Difference
    before_s: _Seconds
    after_s: _Seconds
    is_slower: bool

    @property
    def seen_s(self) -> float:
        """Seconds by which the median iteration became shorter."""
        return self.before_s - self.after_s


@dataclass(frozen=True)
class SelectionMetrics:
    """One selection of ``auto`` for the layers of a pipeline stage, before an iteration.

    Attributes:
        stage: Number of the pipeline stage, from 0.
        changed: Megatron's numbers of the layers that got another strategy, in order.
        predicted_s: Modelled seconds that these changes save in an iteration.
        iteration_s: Median seconds of the iterations before. None if they were not measured.
        seen: What the change before this selection saved. None if it cannot be compared.
    """

    stage: Count
    changed: tuple[Count, ...]
    predicted_s: _Difference
    iteration_s: _Seconds | None = None
    seen: SeenGain | None = None
