import pytest

from megatron_fssdp.planning.placement.topology import GroupRing, Topology


def test_labels_are_numbered_by_first_appearance():
    topology = Topology.from_labels(["b", "a", "b", "c"])
    assert topology.node_of_device == (0, 1, 0, 2)
    assert topology.devices_by_node[0] == (0, 2)


def test_bad_topologies_say_what_was_wanted():
    with pytest.raises(ValueError, match=r"got 0 devices .* wanted one device or more"):
        Topology(())
    with pytest.raises(ValueError, match=r"\[0, 2\], wanted .* every number from 0 on"):
        Topology((0, 2))


def test_the_steps_are_those_of_fastermoes_figure_7():
    """Three groups, seen from group 0: in step 1 it sends to group 2 and gets rows of group 1."""
    ring = GroupRing(rank=1, num_ranks=6, group_size=2)
    assert [list(ring.receivers(step)) for step in range(3)] == [[0, 1], [4, 5], [2, 3]]
    assert [list(ring.senders(step)) for step in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("own_last", [False, True])
@pytest.mark.parametrize("group_size", [1, 2, 3, 6])
def test_each_send_has_a_receive_in_the_same_step(group_size, own_last):
    rings = [GroupRing(rank, 6, group_size, own_last) for rank in range(6)]
    for ring in rings:
        own_step = ring.num_steps - 1 if own_last else 0
        assert ring.rank in ring.senders(own_step)
        assert ring.rank in ring.receivers(own_step)
    for step in range(rings[0].num_steps):
        sent = {(ring.rank, peer) for ring in rings for peer in ring.receivers(step)}
        assert sent == {(peer, ring.rank) for ring in rings for peer in ring.senders(step)}
    assert sum(len(rings[0].receivers(step)) for step in range(rings[0].num_steps)) == 6


def test_groups_are_nodes_unless_a_size_is_given():
    assert GroupRing.of(0, Topology.uniform(8, 4)).group_size == 2
    assert GroupRing.of(0, Topology.uniform(8, 1)).group_size == 1
    assert GroupRing.of(0, Topology((0, 0, 1))).group_size == 1
    assert GroupRing.of(0, Topology.uniform(8, 4), 4).group_size == 4
    with pytest.raises(ValueError, match="group_size is 3: wanted a divisor of the 8"):
        GroupRing.of(0, Topology.uniform(8, 4), 3)
