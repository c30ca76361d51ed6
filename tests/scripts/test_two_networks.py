"""Two emulated nodes with their own networks, joined by a virtual cable; run_node.sh starts torchrun on each.

They have addresses and host names as machines of a cluster have; rendezvous, connections and ranks are real.
Only the file system and the cores are the same.
"""

import os
import signal
import subprocess

import pytest

from benchmarks.testbed.nodes.links import INTERFACE, Nodes
from benchmarks.testbed.nodes.processes import namespaces_refusal
from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.records.metrics import read_metrics
from tests.scripts.node_commands import NodeCommands, built_nodes

from .two_nodes import TwoNodes

pytestmark = pytest.mark.slow

ON_NETWORK = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE}
ITERATIONS, SAVED_EVERY = 40, 5


@pytest.fixture(scope="module")
def network():
    if os.geteuid() != 0:
        pytest.skip("only root may enter the namespaces of another process")
    if refusal := namespaces_refusal():
        pytest.skip(f"no network namespaces: {refusal}")
    with built_nodes(Nodes(2, 10**9)) as nodes:
        yield nodes


def losses(run):
    records = read_metrics(run.out)
    assert [record.iteration for record in records] == list(range(1, ITERATIONS + 1))
    return [record.lm_loss for record in records]


@pytest.fixture(scope="module")
def one_node(network, tmp_path_factory):
    """Train with the same ranks on one node."""
    folder = tmp_path_factory.mktemp("one")
    with TwoNodes(folder, network.on, train_iters=ITERATIONS) as run:
        run.start(nodes=1, ranks_per_node=2, **ON_NETWORK)
        assert run.exit_codes() == [0], run.said()
    return run


def test_two_nodes_train_with_the_losses_of_one(one_node, network, tmp_path):
    with TwoNodes(tmp_path, network.on, train_iters=ITERATIONS) as run:
        run.start(**ON_NETWORK)
        assert run.exit_codes() == [0, 0], run.said()
    assert losses(run) == pytest.approx(losses(one_node), rel=1e-6)
    assert losses(run)[-1] != losses(run)[0]
    assert (read_loads(run.out).counts_ILDE == read_loads(one_node.out).counts_ILDE).all()
    crossed = [sum(layer.cross_node_tokens for layer in record.layers) for record in read_metrics(run.out)]
    assert min(crossed) > 0
    assert not any(layer.cross_node_tokens for layer in read_metrics(one_node.out)[0].layers)


def test_a_node_that_died_rejoins_the_run(one_node, network, tmp_path):
    """The other node restarts its ranks and waits for it; both resume from the last checkpoint."""
    with TwoNodes(tmp_path, network.on, train_iters=ITERATIONS, save_interval=SAVED_EVERY) as run:
        run.start(**ON_NETWORK, MAX_RESTARTS="2")
        run.wait_until(lambda: run.saved_iteration() and run.num_iterations() >= 2 * SAVED_EVERY)
        kill_node(network, 1)
        run.processes[1].wait()
        saved, reached = run.saved_iteration(), run.num_iterations()
        assert reached < ITERATIONS, "the node died after the end"
        assert run.processes[0].poll() is None, run.said()
        run.processes[1] = run.start_node(1)
        assert run.exit_codes() == [0, 0], run.said()
    assert losses(run) == pytest.approx(losses(one_node), rel=1e-6)
    assert f"continuing from iteration {saved} of {ITERATIONS}" in (tmp_path / "log-1").read_text()
    assert run.num_iterations() == ITERATIONS, "the repeated iterations replace the lost ones"


def kill_node(network, node):
    """Kill a node's torchrun, ranks and script at once, as a power cut does."""
    words = ["nsenter", "--target", str(network.keeper), "--net", "--mount", "--"]
    words += ["ip", "netns", "pids", NodeCommands.name(node)]
    pids = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert len(pids) >= 3
    for pid in map(int, pids):
        os.kill(pid, signal.SIGKILL)
