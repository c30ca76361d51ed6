"""The collectives that the runtime calls under each schedule have the number and sizes of the cost model.

Shape letters: T tokens of a tensor-parallel group, M model dim, E experts.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.rows.model_parallel import gather_tokens, split_tokens
from megatron_fssdp.config.strategy.strategy_settings import EpSettings
from megatron_fssdp.planning.cost.tensor_schedules import (
    SCHEDULES,
    Schedule,
    ScheduledLayer,
    collectives_of,
    rows_of_device,
)
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.exchange_selection import exchange_of
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.exchange.row_exchanges import s2_exchange
from megatron_fssdp.runtime.execution.layer_pass import run_layer
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.testing import run_ranks

# Functions of the package have the same names.
MODEL_PARALLEL, SHARDED, GATHERS, EXCHANGES = (
    import_module(f"megatron_fssdp.collectives.rows.{name}")
    for name in ("model_parallel", "sharded_all_to_all", "uneven_all_gather", "uneven_all_to_all")
)

TOKENS, MODEL_DIM, EXPERTS, TOP_K = 16, 6, 4, 2
PARTS = PEERS = 2
LAYER = ScheduledLayer(TOKENS, MODEL_DIM, TOKENS * TOP_K, n_mp=PEERS, n_esp=PARTS, n_ep=2, element_bytes=8)

Journal = list[tuple[str, complex]]
"""Kind and bytes; of SAA the exchange's and, as the imaginary part, the gather's."""


def journal_of(rank: int, world_size: int, schedule: Schedule) -> tuple[Journal, Journal, int]:
    """Kind and length of this rank's collectives in both passes, and the number of rows that it computes."""
    found: Journal = []

    def noting(
        kind: str, function: Callable[..., Any], num_bytes: Callable[..., float]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append((kind, num_bytes(*args)))
            return function(*args, **kwargs)

        return call

    def hidden_bytes(rows: Any, *_: Any) -> float:
        """Collectives of the hidden states only, without those of probabilities, maps and counts."""
        x = rows[0] if isinstance(rows, (tuple, list)) else rows
        return x.nbytes if x.dtype == torch.float64 and x.shape[-1] == MODEL_DIM and x.dim() > 1 else 0.0

    to_parts = noting("all_to_all", SHARDED.send_to_parts, lambda x, *_: hidden_bytes(x) * PARTS)
    # On the way back, a rank receives as much as it sent.
    from_parts = noting(
        "all_to_all",
        SHARDED.sum_from_parts,
        lambda x, route: sum(route.send_D) * PARTS * x[0][:1].nbytes,
    )
    for_all = noting(
        "saa",
        s2_exchange.results_for_all,
        lambda x, route: (
            sum(route.own.send_D) * PARTS * x[0][:1].nbytes + 1j * sum(route.rows_Y) * x[0][:1].nbytes
        ),
    )
    rows = noting("all_to_all", EXCHANGES.exchange_rows, hidden_bytes)
    gather = noting(
        "all_gather",
        GATHERS.gather_rows,
        lambda x, splits, group: hidden_bytes(x) / max(1, len(x)) * sum(splits),
    )
    scatter = noting("reduce_scatter", GATHERS.scatter_rows, hidden_bytes)
    reduce = noting("all_reduce", dist.all_reduce, hidden_bytes)
    with (
        patch.object(SHARDED, "send_to_parts", to_parts),
        patch.object(s2_exchange, "send_to_parts", to_parts),
        patch.object(SHARDED, "sum_from_parts", from_parts),
        patch.object(s2_exchange, "results_for_all", for_all),
        patch.object(EXCHANGES, "exchange_rows", rows),
        patch.object(GATHERS, "gather_rows", gather),
        patch.object(MODEL_PARALLEL, "gather_rows", gather),
        patch.object(GATHERS, "scatter_rows", scatter),
        patch.object(MODEL_PARALLEL.dist, "all_reduce", reduce),
    ):
        hidden, output, num_rows = _forward(rank, world_size, schedule)
        forward = [entry for entry in found if entry[1]]
        found.clear()
        output.sum().backward()
    assert hidden.grad is not None
    return forward, [entry for entry in found if entry[1]], num_rows


def _forward(rank: int, world_size: int, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor, int]:
    device, part = divmod(rank, PARTS)
    devices = [dist.new_group(list(range(x, world_size, PARTS))) for x in range(PARTS)][part]
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    groups = ExpertGroups(
        devices,
        Topology.uniform(world_size // PARTS, 1),
        expert_tensor_parallel=pairs[device],
        parts=dist.new_group(list(range(world_size))),
        tensor_parallel=dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0],
        devices_of_peers=(device, device),
    )
    owner_E = even_owners(EXPERTS, 2)
    parameters = {
        int(e): [
            torch.nn.Parameter(torch.zeros(*shape).double()) for shape in ((2, MODEL_DIM), (MODEL_DIM, 2))
        ]
        for e in np.flatnonzero(owner_E == device)
    }
    executor = MoERuntime(build_strategy("ep", EpSettings())).add_layer(
        LayerContext(1, owner_E, groups.topology), groups, parameters
    )
    # Even, also among the tensor-parallel ranks: token t goes to experts t and t + 1.
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    for token in range(TOKENS):
        routing_map[token, [token % EXPERTS, (token + 1) % EXPERTS]] = True
    leaf = torch.ones(TOKENS, MODEL_DIM, dtype=torch.float64, requires_grad=True)
    hidden, probs = leaf, routing_map.double().requires_grad_()
    divides = schedule in ("s1", "megatron")
    peers = groups.tensor_parallel
    assert peers is not None
    if divides:
        hidden = split_tokens(hidden, peers)
        probs, routing_map = (x.chunk(PEERS)[peers.rank()] for x in (probs, routing_map))
    found: list[int] = []

    def compute(rows: torch.Tensor, row_probs: torch.Tensor, *_: Any) -> torch.Tensor:
        found.append(len(rows))
        return rows * row_probs.unsqueeze(1)

    output, _ = run_layer(
        executor, hidden, probs, routing_map, compute, exchange=exchange_of(schedule, groups)
    )
    return leaf, gather_tokens(output, peers) if divides else output, found[0]


def _as_modelled(journal: Journal) -> list[tuple[str, float]]:
    """Split SAA into the collectives that it overlaps."""
    found: list[tuple[str, float]] = []
    for kind, num_bytes in journal:
        if kind == "saa":
            found += [("overlapped_all_to_all", num_bytes.real), ("all_gather", num_bytes.imag)]
        else:
            found.append((kind, num_bytes.real))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_collectives_equal_those_of_the_cost_model(schedule: Schedule) -> None:
    wanted = [(found.kind, found.num_bytes) for found in collectives_of(schedule, LAYER)]
    # ESP-Split's backward is a gather, ESP-AllReduce's is nothing, ESP-AllGather's a scatter.
    transposed = [size for kind, size in wanted if kind != "all_reduce"]
    transposed += [size for kind, size in wanted if kind == "all_gather" and schedule == "baseline"]
    for forward, backward, num_rows in run_ranks(journal_of, 4, schedule):
        assert _as_modelled(forward) == wanted
        assert num_rows == rows_of_device(schedule, LAYER)
        assert sorted(size for _, size in _as_modelled(backward)) == sorted(transposed)
