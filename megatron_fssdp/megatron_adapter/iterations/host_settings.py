"""A host's training: its settings by Megatron's names, wherever the host keeps them, and its models.

A run is refused if ranks have different settings. Every rank reads its own command line, files and
environment, and plans by them. Ranks that differ in them would wait for each other forever.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.all_ranks import of_all_ranks
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_settings import (
    CHECK_VARIABLE,
    PROFILE_VARIABLE,
    StrategySettings,
    checks_plans,
    profile_iterations,
)
from megatron_fssdp.megatron_adapter.experts.slot_quantities import members_of
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.planning.compiled_form import source_digest
from megatron_fssdp.strategies.auto.auto_strategy import selecting

if TYPE_CHECKING:
    from megatron_fssdp.megatron_adapter.iterations.model_iterations import ModelIterations

logger = logging.getLogger(__name__)

_MODEL = "model_of_fssdp"
# Optimizers in their order, equal on all ranks; those of a chained one are in it, too.
_built: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
_SIZES = ("num_experts", "num_layers", "hidden_size", "seq_length")
_COMPARED = (*_SIZES, "micro_batch_size", "global_batch_size")
_TOLD_AFTER_S = 60.0  # that a rank waits for others


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
        if host is None:
            return cls()
        # Megatron-Bridge writes the first two over the others when its training begins.
        first = ("mixed_precision", "comm_overlap")
        by_name = sorted(vars(host).items(), key=lambda item: item[0] not in first)
        # A section can have the name of a setting, such as ``optimizer``. One is a setting of Megatron-LM.
        restarts = getattr(getattr(host, "inprocess_restart", None), "enabled", None)
        sections = tuple(section for _, section in by_name if is_dataclass(section))
        return cls((*sections, SimpleNamespace(inprocess_restart=restarts)) if sections else (host,))

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
    # Of this rank: its chunks that DDP has wrapped, how many there will be, and their layers.
    chunks: list[Any] = field(default_factory=list, init=False)
    num_chunks: int = field(default=1, init=False)
    numbers: set[tuple[int | None, int]] = field(default_factory=set, init=False)


def check_equal(facts: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Refuse, on all ranks of a group, ranks with different facts. Collective."""
    ranks = dist.get_process_group_ranks(group)
    # A rank without a strategy never comes here, and NCCL would wait for it in silence.
    said = f"[fssdp] rank {dist.get_rank()} waits for others of {len(ranks)} ranks, wanted the strategy on "
    said += "all of them; attach it on every rank, or hand MEGATRON_FSSDP_STRATEGY to all of them"
    waits = threading.Timer(_TOLD_AFTER_S, logger.warning, [said])
    waits.daemon = True
    waits.start()
    try:
        of_ranks = dict(zip(ranks, of_all_ranks(facts, group), strict=True))
    finally:
        waits.cancel()
    lowest, first = next(iter(of_ranks.items()))
    # Other strategies have other settings, so a rank may lack a fact. The strategy is the first fact.
    for name in dict.fromkeys(name for known in of_ranks.values() for name in known):
        for rank, known in of_ranks.items():
            if known.get(name) != first.get(name):
                raise ConfigurationError(
                    f"{name}: got {first.get(name)} on rank {lowest} and {known.get(name)} on rank {rank}, "
                    "wanted the same on all ranks, because all of them must plan alike; start them with the "
                    "same options, files and environment"
                )


def planning_facts(model: HostModel) -> dict[str, Any]:
    """What the plans of a rank depend on, or its part in collectives, by names for the user."""
    settings = model.settings.model_dump(mode="json")
    # Only rank 0 writes records, but all ranks measure for them.
    is_recorded = settings.pop("record_dir", None) is not None
    facts: dict[str, Any] = {
        "--moe-strategy": model.name,
        **{f"--moe-strategy-set {key}": value for key, value in settings.items()},
        "whether --moe-strategy-set record_dir is given": is_recorded,
        "whether --tensorboard-dir or --wandb-project is given": model.host.has_boards,
    }
    facts |= {
        f"--{name.replace('_', '-')}": value
        for name, value in model.host.items()
        # Megatron compares none of them. With another top-k, a rank would train silently.
        if (name.startswith("moe_") or name in _COMPARED) and not callable(value)
    }
    with suppress(PackageNotFoundError):  # It may run without an installation.
        facts["version of megatron_fssdp"] = version("megatron-fssdp")
    facts["version of the planning kernels"] = source_digest()
    if model.session is not None:
        strategy = model.session.strategy
        # A candidate of another package is left out on ranks on which it cannot be built.
        if selecting(strategy):
            facts["strategies to select from"] = tuple(strategy.candidates)
        facts[PROFILE_VARIABLE], facts[CHECK_VARIABLE] = profile_iterations(), checks_plans()
        # The order in which a rank issues its messages depends on it.
        one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        facts["whether CUDA_DEVICE_MAX_CONNECTIONS is 1"] = one_queue
    return facts


def mark(held: Iterable[Any], model: "ModelIterations") -> None:
    """Mark what belongs to a model, which lives as long as these, apart from tensors."""
    for marked in held:
        # Python collects no cycle through a tensor that nodes of autograd hold, as those of DDP's hooks do.
        setattr(marked, _MODEL, weakref.ref(model) if isinstance(marked, torch.Tensor) else model)


def model_of(marked: Any) -> "ModelIterations | None":
    """The model of a marked object."""
    mark = getattr(marked, _MODEL, None)
    return mark() if isinstance(mark, weakref.ref) else mark


def note_optimizer(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Build an optimizer, and note it."""
    init(self, *args, **kwargs)
    _built[self] = None


def optimizer_of(model: "ModelIterations") -> Any:
    """The optimizer that has a model's parameters; several are returned as one; ``None`` without any."""
    # AReaL adds LoRA adapters to models that DDP has wrapped.
    parameters = (parameter for chunk in model.chunks for parameter in chunk.parameters())
    mark((parameter for parameter in parameters if model_of(parameter) is None), model)
    of_model = [optimizer for optimizer in _built if model in models_of(optimizer)]
    inner = {id(member) for chain in of_model for member in getattr(chain, "chained_optimizers", ())}
    outer = [optimizer for optimizer in of_model if id(optimizer) not in inner]
    if len(outer) > 1:
        return SimpleNamespace(chained_optimizers=outer, config=outer[0].config)
    return outer[0] if outer else None


def models_of(optimizer: Any) -> list["ModelIterations"]:
    """The models whose parameters an optimizer has."""
    if not (known := getattr(optimizer, _MODEL, None)):
        known = list({id(model): model for model in _searched(optimizer)}.values())
        setattr(optimizer, _MODEL, known)
    return known


def _searched(optimizer: Any) -> Iterator["ModelIterations"]:
    for member in members_of(optimizer):
        groups = [getattr(member, name, ()) for name in ("float16_groups", "fp32_from_fp32_groups")]
        held = [
            *getattr(member, "buffers", ()),
            *(parameter for group in groups for part in group for parameter in part),
        ]
        if (inner := getattr(member, "optimizer", None)) is not None:
            held += [parameter for group in inner.param_groups for parameter in group["params"]]
        yield from (model for parameter in held if (model := model_of(parameter)) is not None)
