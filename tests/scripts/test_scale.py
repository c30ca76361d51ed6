import importlib
from dataclasses import replace

import numpy as np
import pytest

from megatron_fssdp.collectives.sparse.sparse_transfer import steps_of
from megatron_fssdp.config.cluster_description import load_cluster
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.layer_plan import LayerPlan
from tests.support.python_process import ROOT


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    return importlib.import_module("scale")


def test_messages_are_those_that_the_runtime_posts(scale):
    job, _ = scale.stage_of("Mixtral 8x22B", 64)
    topology = Topology((0, 0, 0, 0, 1, 1, 1, 1))
    present_ED = np.eye(8, dtype=bool)
    present_ED[0] = present_ED[3, 4:7] = True
    placement = ExpertPlacement(np.arange(8), present_ED)
    plan = LayerPlan(placement, two_level_transfer(placement, topology))
    hops = plan.transfer.max_depth + 1

    cluster = load_cluster("h200").model_copy(update={"devices_per_node": 4})
    rule = job.messages(cluster)

    def posted(num_bytes, device, *, is_gather):
        message_bytes = rule.message_bytes(num_bytes, hops, is_far=True)
        steps = steps_of(plan.transfer, device, -(-num_bytes // message_bytes), is_gather=is_gather)
        return sum(len(step.sends) for step in steps)

    elements = job.expert_elements
    for early in (0.0, 0.25):
        sent_XD = scale.sent_by_devices(replace(plan, early=early), job, cluster)
        parts = [round(early * elements), elements - round(early * elements)]
        for device in range(8):
            gathers = sum(posted(2 * part, device, is_gather=True) for part in parts if part)
            assert sent_XD[0, device] == gathers
            assert sent_XD[1, device] == posted(4 * elements, device, is_gather=False)
    assert sent_XD[2].sum() == pytest.approx(placement.num_replicas * elements * (2 + 4) / 2**30)


def test_a_stage_has_all_devices_and_layers(scale):
    for model in scale.MODELS:
        for num_gpus in scale.GPUS:
            job, stages = scale.stage_of(model, num_gpus)
            whole, _ = scale.stage_of(model, 8)
            assert stages * job.num_devices * job.expert_data_parallel_size == num_gpus
            assert stages * (job.num_layers - 1) < whole.num_layers <= stages * job.num_layers
