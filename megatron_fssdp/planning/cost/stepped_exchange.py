"""Seconds of a layer's exchanges and experts in the steps of FasterMoE's smart schedule (§4.2, Fig. 8).

The runtime's exchange is ``dispatchers/smart_schedule.py``. Here, messages run in the order
``S_0 … S_{n−1}, R_0 … R_{n−1}``, and compute in the order ``C_0 … C_{n−1}``. Step 0 uses the links inside a
group. The other steps share the links between groups in equal parts. Compute is divided evenly.

Each step pays the start-up seconds of the whole exchange, and some seconds of the host on each lane. The
price does not know that smaller GEMMs are slower, and that weight gradients are written in every step.
"""

from dataclasses import dataclass

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.link_seconds import LinkTimes
from megatron_fssdp.planning.placement.topology import GroupRing, Topology


@dataclass(frozen=True)
class SteppedExchange:
    """How a layer exchanges rows in steps, and what a step costs in addition to its bytes.

    Attributes:
        num_steps: Number of groups of devices, and so of steps; the paper's n. At least 2.
        between_nodes: Whether the steps after step 0 use links between nodes. Otherwise there is one node.
        host_s: Seconds of the host for each step, on the lane of messages and on that of compute.
    """

    num_steps: int
    between_nodes: bool
    host_s: float = 0.0

    @classmethod
    def of(cls, ring: GroupRing, topology: Topology, host_s: float = 0.0) -> "SteppedExchange | None":
        """The steps of a ring of groups; ``None`` if all devices form one group."""
        return cls(ring.num_steps, topology.num_nodes > 1, host_s) if ring.num_steps > 1 else None

    def seconds(self, first: LinkTimes, second: LinkTimes, experts_s: float) -> float:
        """Seconds from the first sent row to the last result.

        The arguments are the seconds of both exchanges, all groups at once, and of the slowest device.
        """
        sent_s, ends = 0.0, [0.0]
        for step in range(self.num_steps):
            sent_s = sent_s + self.step_s(first, step) + self.host_s
            ends.append(max(ends[-1], sent_s) + (experts_s / self.num_steps + self.host_s))
        returned_s = sent_s
        for step, computed_s in enumerate(ends[1:]):
            returned_s = max(returned_s, computed_s) + self.step_s(second, step) + self.host_s
        return returned_s

    def saves(self, dispatch: LinkTimes, combine: LinkTimes, experts_s: float) -> bool:
        """Whether both passes together take fewer seconds in steps than at once.

        The times are those of all groups at once; ``experts_s`` is that of the forward pass.
        """
        backward_s = BACKWARD_PER_FORWARD * experts_s
        at_once_s = 2 * (dispatch.seconds + combine.seconds) + experts_s + backward_s
        forward_s = self.seconds(dispatch, combine, experts_s)
        return forward_s + self.seconds(combine, dispatch, backward_s) < at_once_s

    def step_s(self, exchange: LinkTimes, step: int) -> float:
        """Seconds of one step's messages in one direction; step 0 is the exchange within the own group."""
        if not step:
            return exchange.near_s if self.between_nodes else 0.0
        whole_s, start_s = exchange.near_s, exchange.near_start_s
        if self.between_nodes:
            whole_s, start_s = exchange.far_s, exchange.far_start_s
        if not whole_s:  # links without bytes have no start-up either
            return 0.0
        return start_s + max(whole_s - start_s, 0.0) / (self.num_steps - 1)
