"""Groups of ranks that exchange rows one after another under the smart schedule (FasterMoE, §4.2)."""

from dataclasses import dataclass

from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True)
class GroupRing:
    """The exchange partners of one rank, step by step: consecutive ranks form groups of equal size.

    The groups form a ring. In each step the rank sends rows to one group and receives rows from one group.

    Attributes:
        rank: The rank whose partners this object describes.
        num_ranks: Number of ranks in all groups together.
        group_size: Number of ranks in a group. It divides ``num_ranks``.
        own_last: Whether a rank exchanges with its own group in the last step. Otherwise it does so in the
            first step. All ranks need the same value.

    Raises:
        ValueError: The group size does not divide the number of ranks.
    """

    rank: int
    num_ranks: int
    group_size: int
    own_last: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.num_ranks % self.group_size:
            raise ValueError(
                f"group_size is {self.group_size}: wanted a divisor of the {self.num_ranks} expert-parallel "
                "ranks; set another group size"
            )

    @classmethod
    def of(cls, rank: int, topology: Topology, group_size: int | None = None) -> "GroupRing":
        """Form groups of a given size, or groups of closely connected ranks (FasterMoE, §4.2).

        Args:
            rank: The rank whose partners the ring describes.
            topology: Nodes of the expert-parallel ranks.
            group_size: Number of ranks in a group. By default, the ranks of a node form a group. If there is
                only one node, or if nodes differ in size, each rank is a group.

        Raises:
            ValueError: The group size does not divide the number of ranks.
        """
        if group_size is None:
            sizes = {len(devices) for devices in topology.devices_by_node}
            group_size = sizes.pop() if len(sizes) == 1 and topology.num_nodes > 1 else 1
        return cls(rank, topology.num_devices, group_size)

    @property
    def num_steps(self) -> int:
        """Number of groups, and so of exchange steps; the paper's n."""
        return self.num_ranks // self.group_size

    @property
    def own_step(self) -> int:
        """The step in which a rank exchanges with its own group."""
        return self.num_steps - 1 if self.own_last else 0

    def receivers(self, step: int) -> range:
        """The ranks to which this rank sends rows in a step.

        They are group ``own − k``, ``k`` steps after the step of the own group (modulo the number of groups).
        """
        return self._group(self.rank // self.group_size - step - self.own_last)

    def senders(self, step: int) -> range:
        """The ranks whose rows this rank computes in a step.

        They are group ``own + k``, ``k`` steps after the step of the own group (modulo the number of groups).
        """
        return self._group(self.rank // self.group_size + step + self.own_last)

    def _group(self, number: int) -> range:
        """Ranks of a group. The number is taken modulo the number of groups."""
        first = number % self.num_steps * self.group_size
        return range(first, first + self.group_size)
