"""Selects the schedule (Parm's order of collectives) of a layer's forward passes (Parm, §V-B, Alg. 1)."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.all_ranks import of_all_ranks
from megatron_fssdp.collectives.link_probes import slowest_medians_s
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.dispatchers.parm.dual_collectives import gather_rows
from megatron_fssdp.dispatchers.parm.shared_route import SharedRoute
from megatron_fssdp.planning.cost.cost_model import LinkCost, fit_link_cost
from megatron_fssdp.planning.cost.tensor_schedules import (
    Group,
    Kind,
    Schedule,
    ScheduleCosts,
    ScheduledLayer,
    predicted_seconds,
)

logger = logging.getLogger(__name__)

_SHARES = (1 / 8, 1 / 2, 1.0)
_NUM_REPETITIONS = 5
_LEAST_S = 1e-9  # The fit of alpha and beta needs positive times.

_Calls = dict[tuple[Kind, Group], tuple[int, Callable[[], object]]]


def have_equal_tokens(config: Any, pg: Any) -> bool:
    """Whether several tensor-parallel ranks have the same tokens: without sequence parallelism."""
    return pg.tp.size() > 1 and not config.sequence_parallel


@dataclass(frozen=True)
class Decision:
    """The schedule of a forward pass, and the modelled seconds of each candidate that was compared."""

    schedule: Schedule
    simultaneous: bool  # ``s2`` passes results on slice by slice (Parm's SAA).
    predicted_s: Mapping[Schedule, float] = field(default_factory=dict)


@dataclass(eq=False)
class ScheduleSelector:
    """Selects the schedule for all layers of a model with the same process groups.

    All ranks that exchange tokens, or have the same ones, make the same selection.
    """

    setting: str  # name of a schedule, or "auto"
    config: Any  # Megatron's TransformerConfig as the user wrote it
    pg: Any  # Megatron's process groups
    _decisions: dict[bool, Decision] = field(init=False, default_factory=dict)  # by owners_only
    _shape: torch.Size | None = field(init=False, default=None)  # of hidden states, equal on all ranks
    _costs: ScheduleCosts | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        pg, self._are_equal = self.pg, have_equal_tokens(self.config, self.pg)
        # Ranks that exchange tokens or have the same. Others may run other numbers of passes, also none.
        inner, outer = sorted((pg.tp, pg.tp_ep), key=lambda group: group.size())
        is_nested = {*dist.get_process_group_ranks(inner)} <= {*dist.get_process_group_ranks(outer)}
        self._deciding = outer if is_nested else pg.tp_dp_cp

    def of(self, hidden: Tensor, *, owners_only: bool = True) -> Decision:
        """The decision for a forward pass with these hidden states, ``[sequence, batch, M]``, undivided.

        Under ``auto``, the first call with several candidates measures costs, collectively over these
        ranks. Later calls neither communicate nor wait. Sequences may have other lengths on other ranks, so
        those of most tokens in the first pass decide for all ranks and passes. If an expert can be in several
        slots (not ``owners_only``), ``auto`` leaves out S2, under which all tensor-parallel ranks must send
        an expert's tokens to the same slots.

        Raises:
            ConfigurationError: The schedule cannot divide the sequence evenly.
        """
        decision = self._decisions.get(owners_only)
        if decision is None:
            decision = self._decisions[owners_only] = self._decide(hidden, owners_only)
        length, n_mp = hidden.shape[0], self.pg.tp.size()
        if self._are_equal and decision.schedule in ("s1", "megatron") and length % n_mp:
            raise ConfigurationError(
                f"schedule {decision.schedule}: got sequences of {length} tokens, wanted a multiple of the "
                f"{n_mp} tensor-parallel ranks; change --seq-length, or use --moe-strategy parm "
                "--moe-strategy-set schedule=s2"
            )
        return decision

    def _decide(self, hidden: Tensor, owners_only: bool) -> Decision:
        pg, config, are_equal = self.pg, self.config, self._are_equal
        # The shape decides and not the routing, because all ranks must take the same steps.
        if self.setting != "auto":
            schedule: Schedule = self.setting  # type: ignore[assignment]
            is_sliced = self._layer(hidden, hidden.shape).slices_pay and not config.variable_seq_lengths
            return Decision(schedule, is_sliced)
        candidates: list[Schedule] = ["s1"]
        # Random logits differ between tensor-parallel ranks, which must route alike under s2.
        is_random = config.moe_router_force_load_balancing or config.moe_router_force_biased is not None
        if owners_only and are_equal and not (config.moe_router_padding_for_quantization or is_random):
            # If tensor-parallel ranks have different tokens, s2 equals s1.
            candidates.append("s2")
        if pg.expt_tp.size() > 1:
            candidates.append("megatron")  # With whole experts, megatron equals s1.
        if len(candidates) > 1 and self._shape is None:
            shapes = of_all_ranks(hidden.shape, self._deciding)
            self._shape = max(shapes, key=lambda shape: (shape[0] % pg.tp.size(), shape.numel()))
        shape = self._shape or hidden.shape
        layer = self._layer(hidden, shape)
        if shape[0] % pg.tp.size() and "s2" in candidates:
            candidates = ["s2"]  # The others divide the sequence.
        predicted: dict[Schedule, float] = {}
        if len(candidates) > 1:
            if self._costs is None:
                self._costs = measured_costs(layer, hidden.detach(), pg, self._deciding, layer.slices_pay)
            predicted = predicted_seconds(layer, self._costs, tuple(candidates))
        # Of equal ones it is the first: S1 (Parm, Alg. 1).
        best = min(candidates, key=lambda name: predicted.get(name, math.inf))
        decision = Decision(best, layer.slices_pay, predicted)
        if pg.tp_dp_cp.rank() == 0 and (are_equal or pg.expt_tp.size() > 1):
            why = ", ".join(f"{name} {1e3 * s:.3f} ms" for name, s in predicted.items())
            logger.info(
                f"[fssdp] schedule {best} for {layer.num_tokens:,.0f} tokens and {layer.num_rows:,.0f} rows "
                f"of a tensor-parallel group (collectives of a forward pass: {why or 'no other possible'})"
            )
        return decision

    def _layer(self, hidden: Tensor, shape: torch.Size) -> ScheduledLayer:
        config, pg, are_equal = self.config, self.pg, self._are_equal
        # Tokens are counted for a whole tensor-parallel group.
        num_tokens = shape[:-1].numel() * (1 if are_equal else pg.tp.size())
        share = 1.0
        if config.moe_expert_capacity_factor is not None:
            factor = float(config.moe_expert_capacity_factor)
            share = factor if config.moe_pad_expert_input_to_capacity else min(1.0, factor)
        return ScheduledLayer(
            num_tokens=num_tokens,
            hidden_size=hidden.shape[-1],
            num_rows=config.moe_router_topk * share * num_tokens,
            n_mp=pg.tp.size(),
            n_esp=pg.expt_tp.size(),
            n_ep=pg.ep.size(),
            element_bytes=hidden.element_size(),
            is_split=not are_equal,
        )


def measured_costs(
    layer: ScheduledLayer, like: Tensor, pg: Any, everyone: dist.ProcessGroup, simultaneous: bool
) -> ScheduleCosts:
    """Measure alpha and beta of each collective whose groups exist, on all ranks of ``everyone`` at once.

    The measured rows have width, dtype and device of ``like``, ``[..., M]``, and the longest median
    of all ranks counts. Costs are those of Parm's message size: bytes of the whole tensor.
    """
    most = layer.num_rows / layer.n_mp / pg.ep.size()
    sizes = [max(1, round(most * share)) for share in _SHARES]
    calls = [_calls(size, like, pg, not layer.is_split, simultaneous=simultaneous) for size in sizes]
    times = {}
    for name in calls[0]:
        of_sizes = [size_calls[name][1] for size_calls in calls]
        times[name] = slowest_medians_s(of_sizes, everyone, like.device, _NUM_REPETITIONS)
    costs: dict[tuple[Kind, Group], LinkCost] = {}
    for name, taken in times.items():
        if name[0] == "overlapped_all_to_all":
            # Eq. 14 counts the gather separately, so this is only the time that the exchange adds to it.
            gather = times["all_gather", "mp"]
            taken = [max(_LEAST_S, both - alone) for both, alone in zip(taken, gather, strict=True)]
        costs[name] = fit_link_cost([size_calls[name][0] for size_calls in calls], taken)
    return costs


def _calls(per_device: int, like: Tensor, pg: Any, are_equal: bool, *, simultaneous: bool) -> _Calls:
    """Each collective with this number of rows for each device: bytes of the whole tensor, and the call."""
    num_devices, num_ranks = pg.ep.size(), pg.tp_ep.size()
    groups: dict[Group, dist.ProcessGroup] = {"ep": pg.ep, "esp": pg.expt_tp, "ep_esp": pg.tp_ep}
    if are_equal:
        groups["mp"] = pg.tp
    own = like.new_zeros(per_device * num_devices, like.shape[-1])
    calls: _Calls = {}
    for name, group in groups.items():
        if (size := group.size()) == 1:
            continue
        if name in ("ep", "ep_esp"):
            sent = like.new_zeros(per_device * size, like.shape[-1])
            exchange = partial(dist.all_to_all_single, torch.empty_like(sent), sent, group=group)
            calls["all_to_all", name] = sent.nbytes, exchange
        else:
            calls["all_gather", name] = own.nbytes * size, partial(gather_rows, own, [len(own)] * size, group)
        if name == "esp":
            # Megatron sums in the data type of the probabilities.
            wide = own.float()
            scatter = partial(dist.reduce_scatter, torch.empty_like(wide), [wide] * size, group=group)
            calls["reduce_scatter", name] = own.nbytes * size, scatter
        if name == "mp":
            device_Y, send_YD = of_all_ranks(pg.ep.rank(), pg.tp), [[per_device] * num_devices] * size
            route = SharedRoute(pg, device_Y, send_YD, [per_device] * num_ranks)
            results = like.new_zeros(per_device * num_ranks, like.shape[-1])
            collect = partial(route.collect, (results,), simultaneous=simultaneous)
            calls["overlapped_all_to_all", "ep_esp"] = results.nbytes, collect
    return calls
