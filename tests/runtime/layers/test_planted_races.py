"""Defects that are planted into the runtime are found on virtual devices, with their places in the code.

Without them, the same cases have no finding: see ``test_virtual_devices.py``.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron_fssdp.collectives.rows.gathered_counts import CountsOnTheWay
from megatron_fssdp.runtime.exchange import arrival_order, chunk_permutation

from megatron_fssdp.collectives.stream_lane import StreamTransfer
from megatron_fssdp.testing import run_ranks
from megatron_fssdp.testing.virtual_cuda import DeviceEvent, Finding, FindingKind, VirtualDevice, virtual_cuda

from ..layer_case import LayerCase
from ..parm_layer import parm_groups, run_parm_layer
from ..rank_layer import run_case, transfer_group

WORLD = 4
ONCE = LayerCase("planted", transfers="once", num_nodes=2, num_iterations=1, device="cuda")
SMART = replace(ONCE, group_size=1, schedule="FFBB", num_iterations=2)
S2 = "s2"
# A function of the package has the same name.
SIMULTANEOUS = import_module("megatron_fssdp.collectives.rows.simultaneous_gather")


@contextmanager
def dropped_wait(device: VirtualDevice) -> Iterator[None]:
    """The layer uses replicas without a wait for their transfer."""

    def wait(transfer: StreamTransfer) -> Any:
        transfer._lane.issue_through(transfer)
        return transfer._results

    with mock.patch.object(StreamTransfer, "wait", wait):
        yield


@contextmanager
def dropped_first_wait(device: VirtualDevice) -> Iterator[None]:
    """A transfer starts without a wait for the work that was there before."""
    make = StreamTransfer.__init__

    def init(transfer: StreamTransfer, *args: Any) -> None:
        make(transfer, *args)
        transfer._ready = torch.cuda.Event()  # It was never recorded, so nothing waits for it.

    with mock.patch.object(StreamTransfer, "__init__", init):
        yield


@contextmanager
def ignored_record_stream(device: VirtualDevice) -> Iterator[None]:
    """Results of a step are given back while they are being sent."""
    device.ignores_record_stream = True
    yield


@contextmanager
def dropped_event_between_lanes(device: VirtualDevice) -> Iterator[None]:
    """S2's gather does not wait for the exchange of the same step."""
    make = SIMULTANEOUS.lane_stream

    class Deaf(torch.cuda.Stream):
        def wait_event(self, event: Any) -> None: ...

    def lane_stream(use: str, *args: Any) -> Any:
        return Deaf() if use == "gather of results" else make(use, *args)

    with mock.patch.object(SIMULTANEOUS, "lane_stream", lane_stream):
        yield


@contextmanager
def cpu_index(device: VirtualDevice) -> Iterator[None]:
    """An index of rows stays on the CPU."""
    make = chunk_permutation.chunk_permutation

    def on_cpu(sizes: np.ndarray, order: np.ndarray, device: torch.device) -> torch.Tensor | None:
        return make(sizes, order, torch.device("cpu"))

    with mock.patch.object(arrival_order, "chunk_permutation", on_cpu):
        yield


@contextmanager
def extra_item(device: VirtualDevice) -> Iterator[None]:
    """The host reads a number of the device before it selects rows."""
    select = chunk_permutation.select

    def reading(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        if index is not None:
            index.sum().item()
        return select(x, index)

    with mock.patch.object(arrival_order, "select", reading):
        yield


@contextmanager
def unawaited_counts(device: VirtualDevice) -> Iterator[None]:
    """The host reads the counts before their copy is complete."""
    with mock.patch.object(CountsOnTheWay, "wait", lambda counts: counts.copies):
        yield


PLANTED: dict[str, tuple[Callable[[VirtualDevice], AbstractContextManager[None]], LayerCase | str]] = {
    "dropped wait": (dropped_wait, ONCE),
    "dropped first wait": (dropped_first_wait, ONCE),
    "ignored record_stream": (ignored_record_stream, SMART),
    "dropped event between lanes": (dropped_event_between_lanes, S2),
    "CPU index": (cpu_index, ONCE),
    "extra item": (extra_item, ONCE),
    "unawaited counts": (unawaited_counts, ONCE),
}


AGAIN = "again: dropped wait"


@dataclass(frozen=True)
class Found:
    """What one rank's device reports."""

    findings: tuple[Finding, ...]
    host_syncs: tuple[DeviceEvent, ...]


def run_planted(rank: int, world_size: int) -> dict[str, Found]:
    """Run a case with each defect, one after the other; the first defect again at the end."""
    transfer_group()
    groups = parm_groups(rank, world_size)
    found = {}
    for name in (*PLANTED, AGAIN):
        plant, case = PLANTED[name.removeprefix("again: ")]
        with virtual_cuda() as device, plant(device):
            if isinstance(case, LayerCase):
                run_case(rank, world_size, case)
            else:
                run_parm_layer(rank, S2, groups, torch.float32, "cuda")
        found[name] = Found(device.findings, device.host_syncs)
    return found


@functools.cache
def planted() -> list[dict[str, Found]]:
    return run_ranks(run_planted, WORLD, timeout_s=240)


@pytest.mark.parametrize(
    ("name", "kind", "place", "other_place"),
    [
        ("dropped wait", FindingKind.RACE, "runtime/experts/grouped_ffn", "collectives/sparse"),
        ("dropped first wait", FindingKind.RACE, "collectives/sparse", "runtime/experts/expert_layout"),
        ("ignored record_stream", FindingKind.FREED_IN_USE, "", "collectives/messages"),
        (
            "dropped event between lanes",
            FindingKind.RACE,
            "collectives/rows/simultaneous_gather",
            "collectives/rows/simultaneous_gather",
        ),
        (
            "unawaited counts",
            FindingKind.RACE,
            "runtime/execution/known_exchange",
            "collectives/rows/gathered_counts",
        ),
        ("CPU index", FindingKind.DEVICE_MIX, "runtime/exchange/chunk_permutation", ""),
    ],
    ids=lambda value: value if value in PLANTED else "",
)
def test_a_planted_defect_is_found_at_its_places(
    name: str, kind: FindingKind, place: str, other_place: str
) -> None:
    # A rank may have nothing to permute or to send.
    findings = [finding for of_rank in planted() for finding in of_rank[name].findings]
    assert any(
        finding.kind is kind
        and finding.place.startswith(place)
        and finding.other_place.startswith(other_place)
        for finding in findings
    ), "\n".join(map(str, findings))


def test_an_extra_read_of_the_host_is_counted_at_its_place() -> None:
    found = [of_rank["extra item"] for of_rank in planted()]
    assert not any(of_rank.findings for of_rank in found)
    reads = [
        event for of_rank in found for event in of_rank.host_syncs if event.what == "_local_scalar_dense"
    ]
    assert any("runtime/exchange/arrival_order" in event.place for event in reads)


def test_findings_are_the_same_in_every_run() -> None:
    for of_rank in planted():
        assert of_rank["dropped wait"].findings == of_rank[AGAIN].findings
