"""One layer of a rank on the runtime, with Megatron's dispatcher and plain experts.

Shape letters: T tokens of this rank, M model dimension, E experts, D devices, P and U slots of a device.
"""

import warnings
from datetime import timedelta
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from devtools.measured_profile import CHEAP_TO_MOVE as PROFILE
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, LocalExperts
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.pass_binder import SlotPass
from megatron_fssdp.runtime.slots.node_slots import NodeSlots
from megatron_fssdp.strategies.layer_plan import LayerContext
from tests.megatron_adapter.layer.small_config import moe_config

from .layer_case import MODEL_DIM


@cache
def rank_groups(peers, overlaps, one_queue, num_nodes, puts=False):
    """This rank's groups, for the runtime and for Megatron; consecutive ranks share experts."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    world_size, rank = dist.get_world_size(), dist.get_rank()

    def row():
        return [dist.new_group(list(range(peer, world_size, peers))) for peer in range(peers)][rank % peers]

    columns = [dist.new_group(list(range(d, d + peers))) for d in range(0, world_size, peers)]
    everyone, column, alone = dist.group.WORLD, columns[rank // peers], dist.new_subgroups(1)[0]
    rows, topology, node = row(), Topology.uniform(world_size // peers, num_nodes), None
    if puts:
        members = [[d * peers + x for d in node] for node in topology.devices_by_node for x in range(peers)]
        made = [dist.new_group(ranks) for ranks in members]
        at = next(at for at, ranks in enumerate(members) if rank in ranks)
        node = NodeSlots(made[at], [member // peers for member in members[at]], timedelta(seconds=60))
    groups = ExpertGroups(
        rows, topology, row() if overlaps else None, column if peers > 1 else None, everyone, one_queue, node
    )
    megatron = ProcessGroupCollection()
    megatron.ep, megatron.tp_ep, megatron.tp, megatron.expt_tp = rows, everyone, alone, column
    return groups, megatron


class RankLayer:
    """One layer, driven as Megatron's layer drives it; ``slots`` is the product's layer."""

    def __init__(self, case, number, weights, runtime):
        self.case, self.weights, self.used = case, weights, list[SlotPass]()
        how = case.peers, case.overlaps, case.one_queue, case.num_nodes, case.puts
        self.groups, self._megatron = rank_groups(*how)
        num_devices = self.groups.num_devices
        owner_E = even_owners(case.num_experts, num_devices)
        profile = PROFILE if case.placement in STRATEGIES else None
        self.parameters = self._own(owner_E)
        self.slots = runtime.add_layer(
            LayerContext(number, owner_E, self.groups.topology, profile),
            self.groups,
            LocalExperts(
                f"layer {number}", self.parameters, **({"await_parameters": self.arrive} if case.late else {})
            ),
            on_pass=self._bind,
        )
        self._dispatchers = {}
        self._arriving = []
        if case.owners is not None:  # Megatron starts with even owners.
            self.move(np.array(case.owners))

    def shard(self, tensors):
        """This rank's part of an expert's fc1 and fc2."""
        peers = self.case.peers
        return [tensor.chunk(peers, dim=i)[dist.get_rank() % peers] for i, tensor in enumerate(tensors)]

    def _layout(self):
        return ExpertLayout.of([tensor.to(self.case.dtype) for tensor in self.shard(self.weights[0])])

    def make(self, expert):
        """Parameters with the values of the reference's expert."""
        made = []
        for i, tensor in enumerate(self.shard(self.weights[expert])):
            copy = tensor.detach().to(self.case.dtype).clone().to(self.case.device)
            parameter = torch.nn.Parameter(copy, requires_grad=i not in self.case.frozen)
            if self.case.has_main_grad and parameter.requires_grad:
                parameter.main_grad = torch.zeros_like(
                    copy, dtype=torch.promote_types(copy.dtype, torch.float32)
                )
                parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
            made.append(parameter)
        return made

    def _own(self, owner_E):
        return {int(e): self.make(e) for e in np.flatnonzero(owner_E == self.groups.device)}

    def move(self, owner_E):
        self.parameters = self._own(owner_E)
        self.slots.own(owner_E, self.parameters)

    def keep(self, strategy, number):
        context = self.slots.local.context
        placement = strategy.drawn(context, number).placement
        own = {e: p for e, p in self.parameters.items() if context.owner_E[e] == self.groups.device}
        replicas = {e: self.make(e) for e in placement.experts_on(self.groups.device) if e not in own}
        self.parameters = {**own, **replicas}
        self.slots.keep(placement, replicas)

    def leave(self):
        """Take the Parameters' values away until :meth:`arrive`, which makes every early read visible."""
        all_parameters = [p for tensors in self.parameters.values() for p in tensors]
        self._arriving = [(p, p.detach().clone()) for p in all_parameters]
        for parameter in all_parameters:
            parameter.data.fill_(torch.nan)

    def arrive(self):
        for parameter, value in self._arriving:
            parameter.data.copy_(value)
        self._arriving = []

    def _bind(self, slot_pass):
        self.used.append(slot_pass)
        kind = slot_pass.slots.slots_per_device, slot_pass.splits is not None
        if kind not in self._dispatchers:
            self._dispatchers[kind] = make_dispatcher(*kind, self.groups, self._megatron, self.case)
        self._pass, self._dispatcher = slot_pass, self._dispatchers[kind]
        self._dispatcher.splits = slot_pass.splits

    def forward(self, hidden, probs, routing_map):
        """The layer's forward pass, ``[T, M]``."""
        slots = self.slots
        slots.prepare(routing_map)
        dispatcher = self._dispatcher
        rows, row_probs = dispatcher.dispatch_preprocess(
            hidden.unsqueeze(1), *slots.remap(routing_map, probs)
        )
        rows, row_probs = dispatcher.token_dispatch(slots.enter_dispatch(rows), row_probs)
        slots.rows_travel()
        rows, rows_P, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        slots.await_weights(rows)
        rows = _experts(rows, rows_P.tolist(), row_probs, self._pass.parameters_U)
        rows = dispatcher.combine_preprocess(slots.leave_experts(rows))
        output = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
        return slots.finish(output.squeeze(1))

    def gradients(self):
        return {
            (expert, i): getattr(parameter, "main_grad", parameter.grad)
            for expert, tensors in self.parameters.items()
            for i, parameter in enumerate(tensors)
        }

    def zero_gradients(self):
        """As Megatron's ``zero_grad_buffer``."""
        for parameter in (p for tensors in self.parameters.values() for p in tensors):
            parameter.grad = None
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()


def make_dispatcher(num_slots, knows_splits, groups, megatron, case):
    """Megatron's all-to-all dispatcher for a number of slots of each device, or ours that knows the rows."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_fssdp.dispatchers.known_splits import KnownSplitsDispatcher

    with warnings.catch_warnings(action="ignore"):  # about every library that is not installed
        config = moe_config(
            groups.num_devices,
            MODEL_DIM,
            num_slots * groups.num_devices,
            moe_router_topk=case.top_k,
            moe_router_pre_softmax=True,
            moe_expert_capacity_factor=99.0 if case.routing == "dropped" else None,
        )
    first = groups.device * num_slots
    kind = KnownSplitsDispatcher if knows_splits else MoEAlltoAllTokenDispatcher
    return kind(num_slots, list(range(first, first + num_slots)), config, megatron)


def _experts(rows, rows_P, row_probs, parameters_U):
    row_probs = row_probs.unsqueeze(1)
    used = [slot for slot, parameters in enumerate(parameters_U) if parameters is not None]
    rows_of_used = [rows_P[slot] for slot in used]
    assert sum(rows_of_used) == len(rows), "rows in an empty slot"
    if not used:  # The result depends on rows and probabilities in any case.
        return (rows * row_probs).to(rows.dtype)
    outputs = []
    for slot, x, prob in zip(used, rows.split(rows_of_used), row_probs.split(rows_of_used), strict=True):
        fc1, fc2 = parameters_U[slot]
        y = functional.linear(functional.gelu(functional.linear(x, fc1)), fc2)
        outputs.append((y * prob).to(y.dtype))
    return torch.cat(outputs)


def _add_to_main_grad(parameter):
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None
