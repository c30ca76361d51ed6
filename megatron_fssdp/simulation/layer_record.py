"""What a strategy does in one iteration: its decisions, and seconds by the planners' price functions.

Shape letters: D devices, E experts.
"""

import operator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices, expected_hops, hops_traffic
from megatron_fssdp.planning.cost.host_seconds import HostWork
from megatron_fssdp.planning.cost.layer_profile import EXACT_SHARES_S
from megatron_fssdp.planning.cost.layer_seconds import exchange_times, transfer_times
from megatron_fssdp.planning.cost.link_seconds import (
    NO_TRANSFER,
    ClusterLinks,
    LinkTimes,
    SteppedExchange,
    TransferTraffic,
    gather_counts_s,
    moves_traffic,
    transfer_traffic,
)
from megatron_fssdp.planning.dispatch.token_dispatch import TokenDispatch
from megatron_fssdp.planning.memory import FP32_BYTES
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.message_size import MessageRule, num_batches
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer
from megatron_fssdp.simulation.dense_messages import NO_MESSAGES, DenseSeconds, MessageSeconds, RankLinks
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.replay import LayerDecision, ReplayedIteration
from megatron_fssdp.strategies.layer_plan import LayerPlan

NO_TIMES = LinkTimes()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LayerRecord:
    """What a layer's plan does in a micro-batch, or in all of an iteration that are equal.

    Seconds are those of one micro-batch's forward pass.
    """

    tokens_D: np.ndarray  # (token, k) pairs that each device computes in these micro-batches, int32 [D]
    cross_node: int = 0  # pairs that are sent to another node
    gathered: int = 0  # experts whose weights travel to replicas
    gathered_between_nodes: int = 0  # those of them that change nodes
    replicas: int = 0  # on all devices together
    most_replicas: int = 0  # on the device that has the most
    most_received: int = 0  # replicas whose gradients come to the device that receives the most, directly
    most_owned: int = 0  # experts of the layer on the device that owns the most
    deduplicated: bool = False  # whether a token is sent once to each node
    life: ReplicaLife = ReplicaLife.ITERATION
    ahead: bool = True  # whether spAG and spRS run at the same time as the compute before the layer
    early: float = 0.0  # share of spAG that runs at the same time as the experts of the layer before
    steps: SteppedExchange | None = None  # steps of the smart schedule, if the layer runs in them
    before_layer_s: float = 0.0  # compute between the previous MoE layer and this transformer layer
    before_again_s: float = 0.0  # what the backward pass computes of it again
    before_gate_s: float = 0.0  # compute before the gate, under which spAG can be hidden
    # Messages of tensor and context parallelism between the layers as before_layer_s, and before the gate.
    before_messages: MessageSeconds = NO_MESSAGES
    gate_messages: MessageSeconds = NO_MESSAGES
    recomputed: bool = False  # whether the backward pass runs the transformer layer's forward pass again
    counts_s: float = 0.0  # gathering the router counts and, with exact dispatch, computing shares
    dispatch: LinkTimes = NO_TIMES  # all-to-alls of rows and probabilities
    combine: LinkTimes = NO_TIMES  # all-to-all of results
    experts_s: float = 0.0  # the experts on the slowest device (FasterMoE, Eq. 1)
    gather_s: float = 0.0  # spAG
    addition_s: float = 0.0  # spAG of what a plan after the gate adds
    reduce_s: float = 0.0  # spRS
    regather: LinkTimes = NO_TIMES  # spAG of all replicas before the backward pass
    plan_s: float = 0.0  # the device waits for the host between the counts and the dispatch
    first_plan_s: float = 0.0  # more of these waits in an iteration's first micro-batch
    host_s: float = 0.0  # the host plans and posts messages in these micro-batches

    def together_s(self, *, backward: bool) -> float:
        """Seconds of a pass from the first sent row to the last result, without counts."""
        first, second, experts_s = self.dispatch, self.combine, self.experts_s
        if backward:
            first, second, experts_s = second, first, BACKWARD_PER_FORWARD * experts_s
        if self.steps is not None:
            return self.steps.seconds(first, second, experts_s)
        return first.seconds + experts_s + second.seconds

    @property
    def moe_s(self) -> float:
        """Seconds of the all-to-alls and experts of a micro-batch, both passes included."""
        return self.counts_s + self.together_s(backward=False) + self.together_s(backward=True)

    @property
    def exchange_s(self) -> float:
        """Seconds of the counts and all-to-alls of a micro-batch, in all passes, one after the other."""
        again = int(self.recomputed)
        return (2 + again) * (self.dispatch.seconds + self.combine.seconds) + (1 + again) * self.counts_s


@dataclass(frozen=True, eq=False, kw_only=True)
class IterationRecord:
    """What a strategy does in one iteration."""

    micro_batches: list[list[LayerRecord]]  # records of each one's layers; a single entry is for all
    num_micro_batches: int = 1
    num_moved: int = 0  # experts that move before the iteration, to a new owner or a new resident replica
    moving_s: float = 0.0  # seconds of these moves, while everything else waits
    plans_s: float = 0.0  # seconds in which a rank plans its part of the layers before the first pass
    behind_s: float = 0.0  # compute behind the last MoE layer in a micro-batch's forward pass
    behind_again_s: float = 0.0  # what the backward pass computes of it again
    behind_messages: MessageSeconds = NO_MESSAGES  # of tensor and context parallelism behind the last layer
    stage_messages_s: float = 0.0  # messages between pipeline stages in a micro-batch
    hides_stage_messages: bool = False  # whether other passes run beside them
    bubble: float = 0.0  # idle seconds of the pipeline stage over those of its micro-batches
    gradient_sync_s: float = 0.0  # reduction of gradients after the last backward pass


@dataclass(eq=False)
class LayerPrices:
    """Prices layers and iterations on the cluster and for the job of a simulation.

    ``steps`` are those of layers under the smart schedule, and ``host`` is a rank's work for each layer. If
    ranks divide the planning, ``plans_s`` are a rank's seconds for its part of the layers.
    """

    cluster: ClusterDescription
    links: ClusterLinks
    job: MoeJob
    topology: Topology
    steps: SteppedExchange | None = None
    host: HostWork = field(default_factory=HostWork)
    plans_s: float = 0.0
    _known: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)

    def iteration(self, decided: ReplayedIteration) -> IterationRecord:
        """The record of one iteration."""
        moved = moves_traffic(decided.source_P, decided.device_P, self.topology)
        times = self.job.num_micro_batches // len(decided.micro_batches)
        dense, num_chunks = self._dense, len(self.job.stage.layers_of_chunk)
        return IterationRecord(
            micro_batches=[
                [self._known_layer(number, index, decision, times) for index, decision in enumerate(layers)]
                for number, layers in enumerate(decided.micro_batches)
            ],
            num_micro_batches=self.job.num_micro_batches,
            num_moved=len(decided.source_P),
            moving_s=self.links.transfer.times(moved, self.job.owned_bytes).seconds,
            plans_s=self.plans_s,
            behind_s=self.job.after_layers_flops / self.cluster.non_expert_flops_per_s,
            behind_again_s=self.job.after_again_flops / self.cluster.non_expert_flops_per_s,
            behind_messages=dense.of_dense.get(self.job.num_layers, NO_MESSAGES),
            stage_messages_s=2 * num_chunks * dense.of_stage_s,
            hides_stage_messages=num_chunks > 1,
            bubble=self.job.bubble,
            gradient_sync_s=self._gradient_sync_s,
        )

    def _known_layer(self, number: int, layer: int, decision: LayerDecision, times: int) -> LayerRecord:
        """The record of a layer in a micro-batch, in as far as it is not that of the last iteration."""
        known = self._known.get((number, layer))
        if known is None or not all(map(operator.is_, known[0], decision)):
            if known is not None and known[0].plan is decision.plan and known[0].planned is decision.planned:
                of_plan = known[1]
            else:
                of_plan = self._of_plan(layer, decision, times, is_first=not number)
            record = LayerRecord(**of_plan, **self._of_loads(layer, decision, times))
            known = self._known[number, layer] = decision, of_plan, record
        return known[2]

    def _sent_choices(self, plan: LayerPlan) -> TokenChoices | None:
        """The choices of tokens that are sent once to each node; ``None`` if they are not."""
        choices = self.job.choices or TokenChoices(self.job.top_k)
        return choices if plan.deduplicated or choices.is_fused else None

    def _of_loads(self, layer: int, decision: LayerDecision, times: int) -> dict[str, Any]:
        """What the counts say about a layer, by the fields of its record; ``times`` equal micro-batches."""
        _, plan, counts_DE = decision
        job, tokens, sent = self.job, plan.dispatch(counts_DE, self.topology, times), self._sent_choices(plan)
        pairs, cross_node = tokens.busiest, tokens.cross_node_tokens
        if sent is not None:
            hops = expected_hops(counts_DE, plan.placement, self.topology, sent)
            pairs, cross_node = hops_traffic(hops), hops.tokens_between_nodes
        dispatch, combine = exchange_times(self.links.all_to_all, pairs, job.token_bytes, times, sent)
        if job.num_peers > 1:
            dispatch, combine = self._with_peers(tokens, times, dispatch, combine)
        # The source with the most tokens sets the time. It also computes tokens that are dropped later.
        pairs_per_device = job.tokens_per_micro_batch * times * job.top_k
        slowest = max(int(counts_DE.sum(axis=1).max()) / pairs_per_device, 1.0)
        s_per_flop = slowest / self.cluster.non_expert_flops_per_s
        s_per_token = job.expert_flops_per_token / self.cluster.expert_flops_per_s / times
        return {
            "tokens_D": tokens.whole_tokens_D.astype(np.int32),
            "cross_node": round(cross_node),
            "before_layer_s": job.before_layer_flops_L[layer] * s_per_flop,
            "before_again_s": sum(job.before_again_flops_L[layer : layer + 1]) * s_per_flop,
            "before_gate_s": job.before_gate_flops_L[layer] * s_per_flop,
            "dispatch": dispatch,
            "combine": combine,
            "experts_s": float(tokens.device_tokens_D.max()) * s_per_token,
        }

    def _of_plan(self, layer: int, decision: LayerDecision, times: int, *, is_first: bool) -> dict[str, Any]:
        """What the plans of a layer say, by the fields of its record, in ``times`` equal micro-batches.

        The host's work for the whole iteration belongs to its first micro-batch.
        """
        (planned, plan, _), job, topology, once = decision, self.job, self.topology, int(is_first)
        life, placement = plan.life, plan.placement
        gather = replicas = transfer_traffic(planned.transfer, topology)
        addition = NO_TRANSFER
        if plan is not planned:
            replicas = addition = transfer_traffic(plan.transfer, topology)
            if not plan.each_micro_batch:
                added = additional_transfer(planned.placement, placement, topology)
                addition = transfer_traffic(added, topology)
        # Gradients of resident replicas are summed at the owners, and the sums travel back.
        gather, reductions = (NO_TRANSFER, 2) if plan.resident else (gather, 1)
        reduced_bytes = FP32_BYTES if job.held_replicas(life).sends_fp32 else job.dtype_bytes
        gather_times, num_gathers = self._transfer(gather)
        addition_times, num_additions = self._transfer(addition)
        regather, num_regathers = self._transfer(replicas)
        reduce_times, num_reductions = self._transfer(replicas, reduced_bytes)
        # How often weights are gathered again before a backward pass, and how often a layer is planned.
        again = times if life is ReplicaLife.LAYER_PASS else 0
        num_plans = times if life is ReplicaLife.MICRO_BATCH else once
        posted = (again or once) * num_gathers + again * num_regathers + num_plans * num_additions
        posted += (again or num_plans) * reductions * num_reductions
        runs = 1 + (layer in job.recomputed)
        if life is ReplicaLife.MICRO_BATCH:
            posted += (runs - 1) * num_plans * num_additions
        each_plan_s = first_plan_s = 0.0
        if planned.each_micro_batch:
            each_plan_s = self.host.dispatch_s + self.host.after_gate_s
        elif planned.corrects and plan is not planned:  # which is also kept without a search
            first_plan_s = self.host.correction_s
        host_s = once * self.host.before_gate_s + times * runs * each_plan_s + once * first_plan_s
        return {
            "gathered": gather.num_experts + addition.num_experts,
            "gathered_between_nodes": gather.num_between_nodes + addition.num_between_nodes,
            "replicas": placement.num_replicas,
            "most_replicas": int(placement.replicas_per_device_D.max()) if placement.num_replicas else 0,
            "most_received": plan.transfer.most_sent,
            "most_owned": int(placement.owned_per_device_D.max()),
            "deduplicated": self._sent_choices(plan) is not None,
            "life": life,
            "ahead": plan.gather_ahead,
            # No experts before the first layer could hide a part, and the smart schedule leaves no room.
            "early": plan.early if plan.is_split and layer and self.steps is None else 0.0,
            "steps": self.steps if plan.in_steps else None,
            "before_messages": self._dense.of_dense.get(layer, NO_MESSAGES),
            "gate_messages": self._dense.of_moe,
            "recomputed": layer in job.recomputed,
            "counts_s": self._counts_s + plan.shares_exactly * (self._counts_s + EXACT_SHARES_S),
            "gather_s": gather_times.seconds,
            "addition_s": addition_times.seconds,
            "reduce_s": reductions * reduce_times.seconds,
            "regather": regather,
            "plan_s": each_plan_s,
            "first_plan_s": first_plan_s,
            "host_s": host_s + self._messages.batch_host_s * posted,
        }

    def _with_peers(self, tokens: TokenDispatch, times: int, *exchange: LinkTimes) -> list[LinkTimes]:
        """Dispatch and combine with the gather of rows among the ranks that hold parts of an expert.

        Each of them gets the rows that the others have received, over the links inside a node.
        """
        rows = float(tokens.device_tokens_D.max()) / times
        peers_s = self.links.counts.near.time_s((self.job.num_peers - 1) * self.job.token_bytes * rows)
        return [
            replace(
                times, near_s=times.near_s + peers_s, far_s=times.far_s + (0 if times.in_turn else peers_s)
            )
            for times in exchange
        ]

    @cached_property
    def _messages(self) -> MessageRule:
        return self.job.messages(self.cluster)

    @cached_property
    def _counts_s(self) -> float:
        return gather_counts_s(self.links.counts, self.topology, self.job.num_experts)

    @cached_property
    def _ranks(self) -> RankLinks:
        return RankLinks(self.cluster, self.job.num_peers)

    @cached_property
    def _dense(self) -> DenseSeconds:
        return self._ranks.dense_seconds(self.job.dense)

    @cached_property
    def _gradient_sync_s(self) -> float:
        """Seconds to reduce gradients over ranks with the same parameters, or 0 if that is hidden."""
        job = self.job
        if not job.reduces_at_end:
            return 0.0
        experts = job.num_layers * max(job.num_experts // job.num_devices, 1) * job.expert_elements
        rings = (
            (job.data_parallel_size, job.dense.tensor_size, job.dense_elements),
            (job.expert_data_parallel_size, job.num_devices * job.num_peers, experts),
        )
        return sum(
            self._ranks.reduction_s(num_ranks, num_groups, job.gradient_bytes * elements)
            for num_ranks, num_groups, elements in rings
        )

    def _transfer(self, traffic: TransferTraffic, element_bytes: int | None = None) -> tuple[LinkTimes, int]:
        """Seconds of a transfer, of weights by default, and the batches of messages that a rank posts."""
        if not traffic.num_experts:
            return NO_TIMES, 0
        num_bytes = self.job.expert_elements * (element_bytes or self.job.dtype_bytes)
        hops, is_far = traffic.num_hops, traffic.num_between_nodes > 0
        message = self._messages.message_bytes(num_bytes, hops, is_far=is_far)
        times = transfer_times(self.links.transfer, traffic, num_bytes, self._messages)
        return times, num_batches(num_bytes, message, hops)
