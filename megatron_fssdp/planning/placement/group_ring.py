"""Groups of ranks that exchange rows in turn under the smart schedule (FasterMoE, §4.2)."""

from dataclasses import dataclass

from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True)
class GroupRing:
    """Consecutive ranks in groups of equal size, seen from one of them.

    Attributes:
        rank: The rank from which the ring is seen.
        num_ranks: Number of ranks in all groups together.
        group_size: Number of ranks in a group; divides ``num_ranks``.
        own_last: Whether a rank exchanges with its own group in the last step instead of the first; the same
            on all ranks.
    """

    rank: int
    num_ranks: int
    group_size: int
    own_last: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.num_ranks % self.group_size:
            raise ValueError(
                f"group_size is {self.group_size}: wanted a divisor of the {self.num_ranks} expert-parallel "
                "ranks"
            )

    @classmethod
    def of(cls, rank: int, topology: Topology, group_size: int | None = None) -> "GroupRing":
        """Groups of a given size; else closely connected ranks, those of a node, are one (FasterMoE, §4.2).

        Args:
            rank: The rank from which the ring is seen.
            topology: Nodes of the expert-parallel ranks.
            group_size: Number of ranks in a group. Default: the ranks of a node; a single rank if there is
                only one node or nodes differ in size.

        Raises:
            ValueError: The size does not divide the ranks.
        """
        if group_size is None:
            sizes = {len(devices) for devices in topology.devices_by_node}
            group_size = sizes.pop() if len(sizes) == 1 and topology.num_nodes > 1 else 1
        return cls(rank, topology.num_devices, group_size)

    @property
    def num_steps(self) -> int:
        """Groups, n."""
        return self.num_ranks // self.group_size

    @property
    def own_step(self) -> int:
        """The step in which a rank exchanges with its own group."""
        return self.num_steps - 1 if self.own_last else 0

    def receivers(self, step: int) -> range:
        """The ranks that this one sends rows to: group ``own − step``, counted from the own step on."""
        return self._group(self.rank // self.group_size - step - self.own_last)

    def senders(self, step: int) -> range:
        """The ranks whose rows this one computes: group ``own + step``, likewise."""
        return self._group(self.rank // self.group_size + step + self.own_last)

    def _group(self, number: int) -> range:
        first = number % self.num_steps * self.group_size
        return range(first, first + self.group_size)
