"""Defects that are planted into the runtime are found on virtual devices, with their places in the code.

Without them, the same cases have no finding: see ``test_virtual_devices.py``.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fssdp.collectives.gathered_counts import CountsOnTheWay
from megatron_fssdp.collectives.transfer_lanes import StreamTransfer
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.runtime.layers import planned_layer, slot_layer
from megatron_fssdp.testing import run_ranks
from tests.support.virtual_cuda import FindingKind
from tests.support.virtual_cuda.programs.known_findings import explained

from ..layer_case import LayerCase
from ..rank_layer import VIRTUAL_PRELOAD, CaseRun, virtual_rank

WORLD = 4
ONCE = LayerCase("planted", num_iterations=1, device="cuda")
EACH = LayerCase("planted-each", ReplicaLife.MICRO_BATCH, num_iterations=1, device="cuda")


@contextmanager
def dropped_wait() -> Iterator[None]:
    """The layer uses replicas without a wait for their transfer."""

    def wait(transfer: StreamTransfer) -> Any:
        transfer._lane.issue_through(transfer)
        return transfer._results

    with mock.patch.object(StreamTransfer, "wait", wait):
        yield


@contextmanager
def dropped_first_wait() -> Iterator[None]:
    """A transfer starts without a wait for the work that was there before."""
    make = StreamTransfer.__init__

    def init(transfer: StreamTransfer, *args: Any) -> None:
        make(transfer, *args)
        transfer._ready = torch.cuda.Event()  # It was never recorded, so nothing waits for it.

    with mock.patch.object(StreamTransfer, "__init__", init):
        yield


@contextmanager
def cpu_table() -> Iterator[None]:
    """The share table stays on the CPU."""
    with mock.patch.object(planned_layer.PlannedLayer, "_on_device", lambda self, table, *_: table):
        yield


@contextmanager
def extra_item() -> Iterator[None]:
    """The host reads a number of the device before it remaps."""
    remap = slot_layer.remap_by_table

    def reading(routing_map: torch.Tensor, *arguments: Any) -> Any:
        routing_map.sum().item()
        return remap(routing_map, *arguments)

    with mock.patch.object(slot_layer, "remap_by_table", reading):
        yield


@contextmanager
def unawaited_counts() -> Iterator[None]:
    """The host reads the counts before their copy is complete."""
    with mock.patch.object(CountsOnTheWay, "wait", lambda counts: counts.copy):
        yield


PLANTED: dict[str, tuple[Callable[[], AbstractContextManager[None]], LayerCase]] = {
    "dropped wait": (dropped_wait, ONCE),
    "dropped first wait": (dropped_first_wait, ONCE),
    "CPU table": (cpu_table, ONCE),
    "extra item": (extra_item, ONCE),
    "unawaited counts": (unawaited_counts, EACH),
}
AGAIN = "again: dropped wait"


def run_planted(rank: int, world_size: int) -> dict[str, tuple[list[Any], list[Any]]]:
    """Findings and host synchronizations with each defect; the first defect again at the end."""
    found = {}
    for name in (*PLANTED, AGAIN):
        plant, case = PLANTED[name.removeprefix("again: ")]
        with virtual_rank(case) as device, plant():
            CaseRun(case, check_plans=False).run()
        found[name] = explained(device.findings)[0], list(device.host_syncs)
    return found


@functools.cache
def planted() -> list[dict[str, tuple[list[Any], list[Any]]]]:
    return run_ranks(run_planted, WORLD, preload=VIRTUAL_PRELOAD, timeout_s=240)


@pytest.mark.parametrize(
    ("name", "kind", "place", "other_place"),
    [
        ("dropped wait", FindingKind.RACE, "tests/runtime/rank_layer", "collectives/messages"),
        ("dropped first wait", FindingKind.RACE, "collectives/messages", "runtime/slots/replica_slots"),
        ("unawaited counts", FindingKind.RACE, "runtime/layers/planned_layer", "collectives/gathered_counts"),
        ("CPU table", FindingKind.DEVICE_MIX, "runtime/slots/remap", ""),
    ],
    ids=lambda value: value if value in PLANTED else "",
)
def test_a_planted_defect_is_found_at_its_places(
    name: str, kind: FindingKind, place: str, other_place: str
) -> None:
    # A rank may have nothing to send.
    findings = [finding for of_rank in planted() for finding in of_rank[name][0]]
    assert any(
        finding.kind is kind
        and finding.place.startswith(place)
        and finding.other_place.startswith(other_place)
        for finding in findings
    ), "\n".join(map(str, findings))


def test_an_extra_read_of_the_host_is_counted_at_its_place() -> None:
    for of_rank in planted():
        findings, syncs = of_rank["extra item"]
        assert not findings
        reads = [event for event in syncs if event.what == "_local_scalar_dense"]
        assert any("runtime/layers/slot_layer" in event.place for event in reads), [str(e) for e in syncs]


def test_findings_are_the_same_in_every_run() -> None:
    for of_rank in planted():
        assert of_rank["dropped wait"][0] == of_rank[AGAIN][0]
