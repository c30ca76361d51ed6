"""Compares phases that end together with devices that go on by themselves, for plain expert parallelism.

Run: ``python -m benchmarks.fluid_exchange RESULTS``, with a ``testbed.json`` of ``python -m
benchmarks.testbed`` or its folder. The simulator adds the longest dispatch, the longest experts and the
longest combine of a layer, as if all devices waited for each other between them. Really, a device goes on as
soon as its own rows have arrived. Here, both are computed from the loads of the testbed: the sum of the
longest phases, and a fluid model in which rows flow and share links fairly (max-min). Start-ups cost nothing.
The difference is what the simulator overestimates.

Shape letters: D devices, E experts, F flows, L MoE layers, N nodes.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.predictor_accuracy import drawn_counts, parsed_options, read
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.placement.placement import even_owners

FP32_BYTES = 4
NEVER_BUSY = 1e12
"""Rate of links inside nodes, in bytes per second. They are much faster than those between nodes."""


@dataclass(frozen=True, eq=False)
class Compute:
    """Compute of every device.

    Attributes:
        seconds_D: Seconds of each device, ``[D]``.
    """

    seconds_D: np.ndarray


@dataclass(frozen=True, eq=False)
class Exchange:
    """Rows that every device sends to every device.

    Attributes:
        bytes_DD: Bytes by source and destination, ``[D, D]``. Those of a device to itself do not count.
    """

    bytes_DD: np.ndarray


Phase = Compute | Exchange


@dataclass(frozen=True, eq=False)
class Links:
    """Links of nodes with one rate in each direction.

    Attributes:
        node_D: Node of each device, ``[D]``.
        bytes_per_s: Rate of a node's link to other nodes.
    """

    node_D: np.ndarray
    bytes_per_s: float

    def longest_s(self, exchange: Exchange) -> float:
        """Seconds of an exchange on its busiest link between nodes."""
        num_nodes = int(self.node_D.max()) + 1
        of_node_ND = np.eye(num_nodes)[self.node_D].T
        bytes_NN = of_node_ND @ exchange.bytes_DD @ of_node_ND.T
        np.fill_diagonal(bytes_NN, 0)
        return float(max(bytes_NN.sum(axis=0).max(), bytes_NN.sum(axis=1).max())) / self.bytes_per_s

    def rates(self, source_F: np.ndarray, destination_F: np.ndarray) -> np.ndarray:
        """Rates of flows that share links fairly (max-min), in bytes per second: ``[F]``.

        The link whose flows get least limits them. The other flows share what is left.
        """
        num_devices, num_nodes = len(self.node_D), int(self.node_D.max()) + 1
        is_far = self.node_D[source_F] != self.node_D[destination_F]
        # Link numbers: nodes out, nodes in, devices out, devices in.
        first = 2 * num_nodes
        out_F = np.where(is_far, self.node_D[source_F], first + source_F)
        in_F = np.where(is_far, num_nodes + self.node_D[destination_F], first + num_devices + destination_F)
        free = np.full(first + 2 * num_devices, NEVER_BUSY)
        free[:first] = self.bytes_per_s
        rate_F, waits_F = np.zeros(len(out_F)), np.ones(len(out_F), bool)
        while waits_F.any():
            flows = np.bincount(np.concatenate([out_F[waits_F], in_F[waits_F]]), minlength=len(free))
            share = np.where(flows > 0, free / np.maximum(flows, 1), np.inf)
            least = float(share.min())
            # Links that are equally tight are full at the same time, apart from rounding.
            is_tight = share <= least * (1 + 1e-9)
            fixed_F = waits_F & (is_tight[out_F] | is_tight[in_F])
            rate_F[fixed_F] = least
            np.subtract.at(free, np.concatenate([out_F[fixed_F], in_F[fixed_F]]), least)
            np.maximum(free, 0.0, out=free)
            waits_F &= ~fixed_F
        return rate_F


def layer_phases(
    pairs_DD: np.ndarray, row_bytes: int, pair_s: float, attention_D: np.ndarray
) -> tuple[list[Phase], list[Phase]]:
    """Phases of a layer's forward and of its backward pass.

    Args:
        pairs_DD: (token, k) pairs by source and computing device, ``[D, D]``.
        row_bytes: Bytes of a row.
        pair_s: Seconds of the experts for a pair.
        attention_D: Seconds before the layer on each device, ``[D]``.
    """
    there, back = Exchange(pairs_DD * row_bytes), Exchange(pairs_DD.T * row_bytes)
    experts_D = pairs_DD.sum(axis=0) * pair_s
    twice = BACKWARD_PER_FORWARD
    return (
        [Compute(attention_D), there, Compute(experts_D), back],
        [there, Compute(twice * experts_D), back, Compute(twice * attention_D)],
    )


def summed_s(phases: Sequence[Phase], links: Links) -> float:
    """Seconds of the phases if each begins when the one before has ended on all devices."""
    return sum(
        float(phase.seconds_D.max()) if isinstance(phase, Compute) else links.longest_s(phase)
        for phase in phases
    )


@dataclass(eq=False)
class FluidRun:
    """All devices on their way through the phases, each as soon as its own rows have arrived and left.

    Attributes:
        phases: Phases of every device.
        links: Links of the nodes.
        now_s: Present time.
    """

    phases: Sequence[Phase]
    links: Links
    now_s: float = 0.0
    _at_D: np.ndarray = field(init=False)
    _until_D: np.ndarray = field(init=False)
    _left: dict[tuple[int, int, int], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        devices = len(self.links.node_D)
        self._at_D, self._until_D = np.zeros(devices, np.int64), np.full(devices, np.inf)
        for device in range(devices):
            self._enter(device)

    def seconds(self) -> float:
        """Run to the end; the seconds of the slowest device."""
        while (self._at_D < len(self.phases)).any():
            self._advance()
        return self.now_s

    def _enter(self, device: int) -> None:
        """Begin a device's present phase."""
        at = int(self._at_D[device])
        if at == len(self.phases):
            return
        phase = self.phases[at]
        if isinstance(phase, Compute):
            self._until_D[device] = self.now_s + phase.seconds_D[device]
            return
        for other, num_bytes in enumerate(phase.bytes_DD[device]):
            if other != device and num_bytes:
                self._left[at, device, other] = float(num_bytes)

    def _advance(self) -> None:
        """Go to the next end of a flow or of a compute phase, and let devices go on."""
        flows = list(self._left)
        step_s = float(self._until_D.min()) - self.now_s
        if flows:
            sources, destinations = np.array([flow[1:] for flow in flows]).T
            rate_F, left_F = self.links.rates(sources, destinations), np.array([*self._left.values()])
            step_s = min(step_s, float((left_F / rate_F).min()))
            # Not by the bytes that are left: rounding can leave some, which then take no measurable time.
            goes_on_F = left_F / rate_F > step_s * (1 + 1e-9)
            left_F = left_F - rate_F * step_s
            self._left = {flows[i]: float(left_F[i]) for i in np.flatnonzero(goes_on_F)}
        self.now_s += step_s
        self._go_on()

    def _go_on(self) -> None:
        """Let every device that has ended its phase begin the next one."""
        moved = True
        while moved:
            moved = False
            for device in np.flatnonzero(self._at_D < len(self.phases)):
                if self._has_ended(int(device)):
                    self._at_D[device] += 1
                    self._until_D[device] = np.inf
                    self._enter(int(device))
                    moved = True

    def _has_ended(self, device: int) -> bool:
        at = int(self._at_D[device])
        phase = self.phases[at]
        if isinstance(phase, Compute):
            return bool(self._until_D[device] <= self.now_s + 1e-12)
        if any(flow[0] == at and device in flow[1:] for flow in self._left):
            return False
        # Sources that have not yet begun this exchange will send later.
        late = (self._at_D < at) & (phase.bytes_DD[:, device] > 0)
        return not late.any()


def main() -> None:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--iteration", type=int, default=4, help="iteration whose loads are taken")
    given = parser.parse_args()
    record = read(given.results)
    options, size, pace = parsed_options(record["options"]), record["size"], record["pace"]
    num_devices = options.nodes * options.ranks_per_node
    links = Links(np.arange(num_devices) // options.ranks_per_node, record["link_payload_bytes_per_s"])
    row_bytes = size["hidden_size"] * FP32_BYTES
    pair_s = 4.0 * size["hidden_size"] * size["ffn_size"] / pace["expert_flops_per_s"]
    owner_E = even_owners(size["num_experts"], num_devices)
    print("| workload | phases end together, ms | devices go on, ms | ratio |\n|---|--:|--:|--:|")
    for workload in dict.fromkeys(sample["workload"] for sample in record["samples"]):
        counts_LDE = drawn_counts(options, workload, size, num_devices)[given.iteration]
        forward: list[Phase] = []
        backward: list[Phase] = []
        for counts_DE in counts_LDE:
            pairs_DD = np.zeros((num_devices, num_devices))
            np.add.at(pairs_DD.T, owner_E, counts_DE.T)
            tokens_D = pairs_DD.sum(axis=1) / size["top_k"]
            attention_D = pace["attention_s"] * tokens_D / size["tokens_per_rank"]
            there, back = layer_phases(pairs_DD, row_bytes, pair_s, attention_D)
            # The last layer is the first one in the backward pass.
            forward, backward = forward + there, back + backward
        phases = forward + backward
        together_s, alone_s = summed_s(phases, links), FluidRun(phases, links).seconds()
        print(f"| {workload} | {1e3 * together_s:.0f} | {1e3 * alone_s:.0f} | {alone_s / together_s:.3f} |")


if __name__ == "__main__":
    main()
