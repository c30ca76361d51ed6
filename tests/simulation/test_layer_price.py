"""The planners' price of a layer is the simulator's: both are made of the same pieces.

Compared is what one more layer adds to an iteration, because a re-materialized gather runs behind the
reduction of the layer above, and split transfers run beside the experts of the layer before. Conditions are
even where a price knows nothing else: every source routes as many tokens, all layers are alike, and links
have the costs of their description, not of single measured collectives. Prices then agree to the last
digits, wherever replicas are and whatever links and devices cost. With all transfers but these, a single
layer agrees as well.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.cost.link_seconds import cluster_links, topology_of
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.simulation.lanes import Lanes
from megatron_fssdp.simulation.layer_record import LayerPrices
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.replay import LayerDecision, ReplayedIteration
from megatron_fssdp.simulation.simulator import layer_profile
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import early_share, plan_price
from tests.drawn_examples import SEEDS
from tests.simulation.small_jobs import cluster_of, job_of

LIVES = (ReplicaLife.LAYER_PASS, ReplicaLife.MICRO_BATCH, ReplicaLife.ITERATION, ReplicaLife.RESIDENT)
PAIRS_PER_SOURCE = 24


@dataclass(frozen=True, eq=False)
class Case:
    """One layer's plan and loads, and where they run."""

    cluster: ClusterDescription
    job: MoeJob
    plan: LayerPlan
    planned: LayerPlan
    counts_DE: np.ndarray
    context: LayerContext

    def price(self):
        return plan_price(self.plan, self.counts_DE, self.context, planned=self.planned)

    def simulated_parts_s(self, num_layers):
        """Seconds of an iteration of so many layers like this one, by what they go on."""
        profile, topology = self.context.profile, self.context.topology
        assert profile is not None
        assert profile.choices is not None
        job = replace(
            self.job,
            top_k=profile.choices.top_k,
            choices=profile.choices,
            before_layer_flops_L=(0.0,) * num_layers,
            before_gate_flops_L=self.job.before_gate_flops_L * num_layers,
        )
        prices = LayerPrices(self.cluster, cluster_links(self.cluster), job, topology)
        layers = [LayerDecision(self.planned, self.plan, self.counts_DE)] * num_layers
        nobody_P = np.zeros(0, np.int64)
        record = prices.iteration(ReplayedIteration([layers], nobody_P, nobody_P))
        return Lanes().run_iteration(record).parts_s


@st.composite
def cases(draw):
    """Random links, devices, loads and replicas; calibrated ones and split ones among them."""
    nodes, per_node = draw(st.sampled_from([(1, 2), (1, 4), (2, 2), (4, 1), (3, 2)]))
    devices = nodes * per_node
    starts_s = st.sampled_from([0.0, 0.003, 0.5])
    cluster = cluster_of(
        nodes=nodes, per_node=per_node, near_alpha_s=draw(starts_s), far_alpha_s=draw(starts_s)
    )
    faster = {"bandwidth_bytes_per_s": draw(st.sampled_from([50.0, 1000.0, 30_000.0]))}
    of_node = cluster.inter_node.model_copy(update=faster)
    nic = {"bandwidth_bytes_per_s": of_node.bandwidth_bytes_per_s / draw(st.sampled_from([1, per_node]))}
    links = {"inter_node": of_node, "inter_device": of_node.model_copy(update=nic)}
    cluster = cluster.model_copy(update=links)
    num_experts = devices * 2
    num_micro_batches = draw(st.integers(1, 4))
    job = job_of(
        devices=devices,
        experts=num_experts,
        tokens_per_micro_batch=PAIRS_PER_SOURCE,
        num_micro_batches=num_micro_batches,
        before_gate_flops_L=(draw(st.sampled_from([0.0, 0.5, 3.0, 100.0])),),
        expert_elements=draw(st.sampled_from([1, 50, 700])),
    )
    rng = np.random.default_rng(draw(SEEDS))
    shares_E = rng.dirichlet(np.full(num_experts, 0.4))
    micro_batch_DE = rng.multinomial(PAIRS_PER_SOURCE, shares_E, size=devices).astype(np.int64)
    counts_DE = micro_batch_DE * num_micro_batches
    topology, owner_E = topology_of(cluster, devices), even_owners(num_experts, devices)
    splits = draw(st.sampled_from([False, False, True]))
    life = ReplicaLife.ITERATION if splits else draw(st.sampled_from(LIVES))
    choices = TokenChoices(draw(st.sampled_from([1, 2, 4])), *draw(st.sampled_from([(1, 1), (0.7, 1.3)])))
    deduplicated = draw(st.booleans())
    profile = replace(layer_profile(job, cluster, life), choices=choices, deduplicated=deduplicated)
    context = LayerContext(1, owner_E, topology, profile)
    owned_ED = ExpertPlacement.owners_only(owner_E, devices).present_ED
    drawn_ED = rng.random((num_experts, devices)) < draw(st.sampled_from([0.0, 0.1, 0.5]))

    def plan_of(present_ED, early=0.0):
        placement = ExpertPlacement(owner_E, present_ED | owned_ED)
        return LayerPlan(
            placement,
            two_level_transfer(placement, topology),
            gather_ahead=is_ahead,
            rematerialize=life is ReplicaLife.LAYER_PASS,
            each_micro_batch=life is ReplicaLife.MICRO_BATCH,
            resident=life is ReplicaLife.RESIDENT,
            early=early,
            deduplicated=deduplicated,
        )

    is_ahead = splits or life is ReplicaLife.MICRO_BATCH or draw(st.booleans())
    planned = plan = plan_of(drawn_ED)
    if splits:
        early = early_share(plan.transfer, float(counts_DE.sum()), context)
        planned = plan = plan_of(drawn_ED, early)
    elif life is ReplicaLife.MICRO_BATCH:
        planned = LayerPlan.owners_only(context, each_micro_batch=True)
    elif life is not ReplicaLife.RESIDENT and draw(st.booleans()):
        planned = plan_of(drawn_ED & (rng.random(drawn_ED.shape) < 0.5))
    return Case(cluster, job, plan, planned, counts_DE, context)


def nearly(value):
    return pytest.approx(float(value), rel=1e-9, abs=1e-9)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_one_more_layer_adds_its_price(case):
    fewer_s, more_s = case.simulated_parts_s(2), case.simulated_parts_s(3)
    parts_s, price = {part: more_s[part] - fewer_s[part] for part in more_s}, case.price()
    assert parts_s["other compute"] == nearly(price.before_s)
    assert parts_s["experts"] == nearly(price.experts_s)
    assert parts_s["waiting for spRS"] == nearly(price.reduce_s)
    gathered_s = parts_s["waiting for spAG"] + parts_s["all-to-all"]
    assert gathered_s == nearly(price.gather_s + price.all_to_all_s)
    if case.plan.life is not ReplicaLife.LAYER_PASS:
        # A gather that shares the links with combine's backward pass makes that one longer.
        assert parts_s["all-to-all"] == nearly(price.all_to_all_s)
    assert sum(parts_s.values()) == nearly(price.seconds)
