"""A host's training: its settings by Megatron's names, wherever the host keeps them, and its model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession


@dataclass(frozen=True)
class HostSettings:
    """Settings by Megatron's names, looked up in the objects of a host; the first with a value counts.

    ``sources`` are Megatron's parsed arguments, sections of Megatron-Bridge's container, and the configs of
    megatron-core's model, DDP and optimizer, which are added when they are known. Unknown names are ``None``.
    """

    sources: tuple[Any, ...] = ()
    iteration: Callable[[], int] | None = None  # complete iterations; None if the host does not count them
    resumes: Callable[[], bool] = lambda: False  # whether the run continues from a checkpoint
    flops: Callable[[int], float] = lambda batch_size: 0.0  # of an iteration; 0 if nobody counts them
    boards: Callable[[], Sequence[Any]] = lambda: (None, None)  # writers of TensorBoard and Weights & Biases
    has_boards: bool = False
    exports_by_name: bool = True  # Somebody may read experts by name without a word.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        values = [getattr(source, name) for source in self.sources if hasattr(source, name)]
        return next(
            (value for value in values if value is not None and value is not False),
            values[0] if values else None,
        )

    @classmethod
    def of(cls, host: Any) -> "HostSettings":
        """Settings of an object, or of its sections if these are dataclasses; none of ``None``."""
        sections = (
            [section for section in vars(host).values() if is_dataclass(section)] if host is not None else []
        )
        # A section can have the name of a setting, such as ``optimizer``.
        return cls(() if host is None else tuple(sections) or (host,))

    def with_sources(self, *more: Any) -> "HostSettings":
        """Settings that are also looked up in more objects, after those that are known."""
        return replace(self, sources=(*self.sources, *more))

    def items(self) -> Iterator[tuple[str, Any]]:
        """All names with their values."""
        names = dict.fromkeys(name for source in self.sources for name in vars(source))
        return ((name, getattr(self, name)) for name in names)


@dataclass(eq=False)
class HostModel:
    """A model that a host trains under a strategy: what the files around its iterations need to know of it.

    The ``session`` is ``None`` under ``none``.
    """

    name: str  # of the strategy
    settings: StrategySettings
    host: HostSettings
    session: StrategySession | None
    chunks: list[Any] = field(default_factory=list, init=False)  # of this rank, as DDP wraps them
