import numpy as np
import pytest

from megatron_fssdp.planning.placement.topology import Topology


def test_uniform_nodes_are_contiguous_and_equal():
    topology = Topology.uniform(6, 3)
    assert topology.node_of_device == (0, 0, 1, 1, 2, 2)
    assert (topology.num_devices, topology.num_nodes) == (6, 3)
    assert [topology.devices_by_node[n] for n in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert topology.node_of_device_D.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        topology.node_of_device_D[0] = 1


def test_a_single_node_has_all_devices():
    assert Topology.uniform(3, 1) == Topology((0, 0, 0))


def test_labels_are_numbered_by_first_appearance():
    topology = Topology.from_labels(["b", "a", "b", "c"])
    assert topology.node_of_device == (0, 1, 0, 2)
    assert topology.devices_by_node[0] == (0, 2)


@pytest.mark.parametrize(
    "topology", [Topology.uniform(6, 1), Topology.uniform(6, 2), Topology.uniform(3, 3), Topology((0, 1, 0))]
)
def test_values_are_summed_over_the_devices_of_each_node(topology):
    values_DE = np.random.default_rng(0).random((topology.num_devices, 4))
    for node, total_E in enumerate(topology.sum_over_nodes(values_DE)):
        np.testing.assert_allclose(total_E, values_DE[list(topology.devices_by_node[node])].sum(axis=0))


def test_bad_topologies_say_what_was_wanted():
    with pytest.raises(ValueError, match="got 0 devices, wanted at least 1"):
        Topology(())
    with pytest.raises(ValueError, match=r"\[0, 2\], wanted every number from 0 to 1"):
        Topology((0, 2))
    with pytest.raises(ValueError, match="7 devices cannot form 2 equal nodes"):
        Topology.uniform(7, 2)
    with pytest.raises(ValueError, match="0 devices"):
        Topology.uniform(0, 1)
