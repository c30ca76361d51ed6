import pytest

from megatron_fssdp.planning.placement.group_ring import GroupRing
from megatron_fssdp.planning.placement.topology import Topology


def test_the_steps_are_those_of_fastermoes_figure_7() -> None:
    """Three groups, seen from group 0: in step 1 it sends to group 2 and gets rows of group 1."""
    ring = GroupRing(rank=1, num_ranks=6, group_size=2)
    assert [list(ring.receivers(step)) for step in range(3)] == [[0, 1], [4, 5], [2, 3]]
    assert [list(ring.senders(step)) for step in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("own_last", [False, True])
@pytest.mark.parametrize("group_size", [1, 2, 3, 6])
def test_each_send_has_a_receive_in_the_same_step(group_size: int, own_last: bool) -> None:
    rings = [GroupRing(rank, 6, group_size, own_last) for rank in range(6)]
    for ring in rings:
        assert ring.rank in ring.senders(ring.own_step)
        assert ring.rank in ring.receivers(ring.own_step)
        assert ring.own_step == (ring.num_steps - 1 if own_last else 0)
    for step in range(rings[0].num_steps):
        sent = {(ring.rank, peer) for ring in rings for peer in ring.receivers(step)}
        assert sent == {(peer, ring.rank) for ring in rings for peer in ring.senders(step)}
    assert sum(len(rings[0].receivers(step)) for step in range(rings[0].num_steps)) == 6


def test_groups_are_nodes_unless_a_size_is_given() -> None:
    assert GroupRing.of(0, Topology.uniform(8, 4)).group_size == 2
    assert GroupRing.of(0, Topology.uniform(8, 1)).group_size == 1
    assert GroupRing.of(0, Topology((0, 0, 1))).group_size == 1
    assert GroupRing.of(0, Topology.uniform(8, 4), 4).group_size == 4
    with pytest.raises(ValueError, match="group_size is 3: wanted a divisor of the 8"):
        GroupRing.of(0, Topology.uniform(8, 4), 3)
