"""What the plugin adds to Megatron's saving and loading of checkpoints: hints, and no half-written ones.

Hints are plain values in a checkpoint's common state with which a run continues as before. A checkpoint
can be loaded without its hints, under any strategy and owner map and in stock Megatron, which ignores them.
All ranks save the same values. Hints travel with experts: a checkpoint without experts (adapters only) has
none, because its experts come from elsewhere.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CONFIG_FNAME
from megatron.core.utils import log_single_rank

from megatron_fssdp.collectives.all_ranks import of_all_ranks
from megatron_fssdp.collectives.messages import naming_failures
from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots
from megatron_fssdp.megatron_adapter.experts.named_copies import slots_in
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.megatron_adapter.wrapping import wrap
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.strategies.auto.auto_strategy import AutoStrategy, selecting

logger = logging.getLogger(__name__)

# Megatron writes these files last, and they mark a folder as a torch_dist checkpoint. The order matters: if a
# save is killed between their deletions, a load finds the second file, misses the first one and fails.
_MARKS = (".metadata", CONFIG_FNAME)


@dataclass(frozen=True)
class OwnerHint:
    """The owner maps of all pipeline stages. A run of the same layout moves experts there, then trains."""

    key: ClassVar[str] = "megatron_fssdp_owners"  # in the checkpoint's common state
    slots: ExpertSlots

    def gather(self) -> dict[str, Any] | None:
        """Return the value to save; ``None`` if all stages have Megatron's even distribution. Collective."""
        owners, lists = self._next_owners(), None
        if owners is not None and not owners.is_even:
            lists = {"layer_numbers": list(self.slots.layer_numbers()), **owners.as_lists()}
        stages = _of_all_stages(lists)
        return None if all(lists is None for lists in stages) else {"stages": stages}

    def take(self, hint: Any) -> None:
        """Note a checkpoint's owner map. Experts are loaded by name, and move there before training."""
        group = parallel_state.get_pipeline_model_parallel_group()
        present = layout(self.slots.layer_numbers(), self._next_owners())
        if (owners := fitting_owners(hint, present, group.rank(), group.size())) is not None:
            self.slots.saved_owners = owners
            _log(logging.INFO, "experts keep the owners of the checkpoint")

    def _next_owners(self) -> OwnerMap | None:
        # Experts are home for the save, and move back before the next iteration.
        return (self.slots.saved_owners or self.slots.owners) if self.slots.layers else None


@dataclass(frozen=True)
class StrategyHint:
    """The strategy that ``auto`` has selected for every layer."""

    key: ClassVar[str] = "megatron_fssdp_choices"
    strategy: AutoStrategy
    slots: ExpertSlots

    def gather(self) -> dict[str, str]:
        """Return the selected strategies by layer number (as text) of all stages. Collective."""
        named = {str(layer): self.strategy.selected(layer) for layer in self.slots.layer_numbers()}
        return {layer: name for stage in _of_all_stages(named) for layer, name in stage.items() if name}

    def take(self, hint: Any) -> None:
        """Continue with the saved selection, whatever the layout of the run that saved it was."""
        self.strategy.resume({int(layer): str(name) for layer, name in hint.items()})
        _log(logging.INFO, "layers keep the strategies of the checkpoint")


@dataclass(frozen=True)
class LoadHint:
    """The loads of the latest iterations, so that a resumed run is balanced from its first iteration.

    If the limits of replicas are given, nothing else decides about plans, and a resumed run has the bits of
    one without a break. Measured costs are measured anew.
    """

    key: ClassVar[str] = "megatron_fssdp_loads"
    runtime: MoERuntime

    def gather(self) -> list[dict[str, Any]]:
        """Return what every expert-parallel group knows, with its global ranks. Collective."""
        own, groups = self._ranks(), list[dict[str, Any]]()
        # All ranks of a group know the same. One gather would take the largest part once for each rank, on
        # the device.
        for first in sorted({ranks[0] for ranks in of_all_ranks(own) if ranks}):
            known: list[Any] = [None]
            if first == dist.get_rank():
                layers = {str(n): _plain(history.state()) for n, history in self._histories()}
                known = [{"ranks": own, "layers": layers}]
            dist.broadcast_object_list(known, src=first)
            groups += known
        return groups

    def take(self, hint: Any) -> None:
        """Continue with the saved loads, if they are those of this run's groups and layers."""
        histories, ranks = self._histories(), self._ranks()
        saved: dict[str, Any] = next((group["layers"] for group in hint if group["ranks"] == ranks), {})
        if saved.keys() != {str(layer) for layer, _ in histories}:
            raise ValueError("got loads of another parallel layout or another model")
        for layer, history in histories:
            history.resume(saved[str(layer)])

    def _ranks(self) -> list[int]:
        layers = self.runtime.layers
        return dist.get_process_group_ranks(layers[0].groups.expert_parallel) if layers else []

    def _histories(self) -> list[tuple[int, LoadHistory]]:
        return [(layer.local.context.layer, layer.history) for layer in self.runtime.layers]


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    # Megatron reads the common state without objects of numpy.
    return {**state, "counts_IDE": torch.from_numpy(state["counts_IDE"])}


CheckpointHint = OwnerHint | StrategyHint | LoadHint


def hints_of(session: StrategySession) -> list[CheckpointHint]:
    """Return hints for what a run with the session's strategy may change."""
    strategy = session.strategy
    hints: list[CheckpointHint] = [OwnerHint(session.slots)] if strategy.moves_owners else []
    if selecting(strategy):
        hints.append(StrategyHint(strategy, session.slots))
    if strategy.may_replicate(1) or hints:
        hints.append(LoadHint(session.runtime))
    return hints


_sessions: list[weakref.ref[StrategySession]] = []  # in the same order on all ranks
_loading: list[StrategySession] = []  # whose experts the running load fills


def add(session: StrategySession) -> None:
    """Save and load the hints of a session with its experts."""
    _sessions.append(weakref.ref(session))
    _install()


@cache  # once in a process
def _install() -> None:
    wrap(dist_checkpointing, "save", save_with_new_marks)
    # Both functions of megatron-core look these up when they are called.
    wrap(serialization, "save_preprocess", _save_hints)
    wrap(serialization, "load_preprocess", _expect_experts)
    wrap(serialization, "load_common_state_dict", _take_hints)


def _in(sharded_state_dict: Any) -> dict[int, StrategySession]:
    """The sessions whose experts are in a sharded state dict, by their numbers."""
    slots = slots_in(sharded_state_dict)
    alive = {number: session for number, ref in enumerate(_sessions) if (session := ref()) is not None}
    return {number: session for number, session in alive.items() if session.slots in slots}


def _save_hints(preprocess: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    # A stage without MoE layers takes part for the others. Sessions of dropped models do not: Python frees
    # them at other times on each rank.
    numbers, hints = _of_all_stages({*_in(sharded_state_dict)}), dict[str, Any]()
    for session in (_sessions[number]() for number in sorted(set[int]().union(*numbers))):
        assert session is not None
        hints |= {hint.key: hint.gather() for hint in hints_of(session)}
    known = {key: value for key, value in hints.items() if value is not None}
    return preprocess({**sharded_state_dict, **known}, *args, **kwargs)


def _expect_experts(preprocess: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    _loading[:] = _in(sharded_state_dict).values()
    return preprocess(sharded_state_dict, *args, **kwargs)


def _take_hints(load_common: Any, *args: Any, **kwargs: Any) -> Any:
    common = load_common(*args, **kwargs)
    sessions, _loading[:] = list(_loading), []
    for session in sessions:
        for hint in hints_of(session):
            if hint.key in common:
                take_or_log(hint, common[hint.key])
    return common


def take_or_log(hint: CheckpointHint, saved: Any) -> None:
    """Continue with what a checkpoint says, or log one line why it is not used. Every rank calls it."""
    try:
        hint.take(saved)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"it cannot be read ({error!r})"
        _log(logging.WARNING, f"the checkpoint's {hint.key} are not used: {reason}")


def save_with_new_marks(
    save: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    """Save by ``megatron.core.dist_checkpointing``, which first deletes the marks.

    A run that resumes from an earlier iteration saves into folders that hold complete checkpoints. If such a
    save were killed, old marks would make a checkpoint of a mixture of old and new data.
    """
    slots_in(sharded_state_dict)  # It may refuse the save, which must leave the folder as it is.
    # No rank writes data before the deletion, because all ranks plan the save with rank 0 first.
    if dist.get_rank() == 0:
        for name in _MARKS:
            (Path(str(checkpoint_dir)) / name).unlink(missing_ok=True)
    with naming_failures(f"saving {checkpoint_dir}"):
        return save(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def fitting_owners(hint: Any, present: str, rank: int, num_stages: int) -> OwnerMap | None:
    """Return the owner map that a hint contains for stage ``rank``, which has the ``present`` layout.

    Raises:
        ValueError: The hint comes from another layout or another model, or it is damaged.
    """
    stages: list[Mapping[str, Any] | None] = hint["stages"]
    if len(stages) != num_stages:
        raise ValueError(f"got an owner map of {len(stages)} pipeline stages, wanted {num_stages}")
    if (mine := stages[rank]) is None:
        return None
    owners = OwnerMap.from_lists(mine)
    if (got := layout(mine["layer_numbers"], owners)) != present:
        raise ValueError(f"got an owner map of {got} on stage {rank}, wanted {present}")
    return owners


def layout(layer_numbers: Sequence[int], owners: OwnerMap | None) -> str:
    """Describe what must be equal, so that the owners of one run fit another."""
    if owners is None:
        return "no MoE layers"
    layers = ", ".join(map(str, layer_numbers))
    return (
        f"{owners.num_layers} MoE layers ({layers}) with {owners.num_experts} experts on "
        f"{owners.num_devices} devices"
    )


def _of_all_stages(own: Any) -> list[Any]:
    return of_all_ranks(own, parallel_state.get_pipeline_model_parallel_group())


def _log(level: int, message: str) -> None:
    log_single_rank(logger, level, f"[fssdp] {message}")
