"""The runtime of a model: all MoE layers of this rank under one strategy, and the clock of iterations."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.gathered_counts import start_counts
from megatron_fssdp.collectives.messages import wait_for
from megatron_fssdp.collectives.transfer_lanes import TransferTimer
from megatron_fssdp.runtime.clocks.pass_timer import PassTimer
from megatron_fssdp.runtime.experts.expert_layout import LocalExperts
from megatron_fssdp.runtime.layers.expert_groups import ExpertGroups
from megatron_fssdp.runtime.layers.home_gradients import HomeGradients
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.layer_passes import LayerPasses
from megatron_fssdp.runtime.layers.layer_planner import LayerPlanner
from megatron_fssdp.runtime.layers.local_layer import IterationClock, LocalLayer
from megatron_fssdp.runtime.layers.pass_binder import PassBinder, SlotPass
from megatron_fssdp.runtime.layers.slot_counts import SlotCounts
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.runtime.slots.remap.reference import sent_to
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.strategy import Strategy


class MoERuntime:
    """The layers of a model that share a strategy.

    A training calls these methods; the Megatron adapter does this::

        begin_iteration    before the first forward pass of an iteration
        expect             if more micro-batches follow than it was told
        reset_gradients    where gradients are set to zero: drops what an abandoned iteration has left
        finish_gradients   before gradients are read, or reduced over data-parallel ranks
        end_passes         after the last backward pass
        end_iteration      after the optimizer step

    Forward passes without backward passes are in an ``evaluation``, also inside of an iteration. They change
    neither its plans nor its counts. Inside, they compute with owners alone, because replicas have the
    weights with which the iteration began. So do other passes outside.

    To ``measure`` means that for reports the first device of each group keeps the device loads, bytes and
    times of transfers, and every rank the seconds of its passes.
    """

    def __init__(self, strategy: Strategy, *, measure: bool = False, check_plans: bool = False) -> None:
        self.strategy, self.measure, self.check_plans = strategy, measure, check_plans
        self.layers: list[SlotLayer] = []
        self.clock, self.timer = IterationClock(), PassTimer()
        self._counts: list[_SharedCounts] = []
        # By group, and not by its name, which groups that a host makes anew do not have.
        self._num_shared: dict[dist.ProcessGroup, int] = {}
        self._planners: dict[dist.ProcessGroup, LayerPlanner] = {}

    def add_layer(
        self,
        context: LayerContext,
        groups: ExpertGroups,
        experts: LocalExperts,
        *,
        on_pass: Callable[[SlotPass], object] = lambda slot_pass: None,
        on_home: Callable[[], object] = lambda: None,
        least_slots: int = 0,
        slot_multiple: int = 1,
    ) -> SlotLayer:
        """Register a layer; layers must be added in the same order on every rank.

        The keywords are those of the layer's parts: :class:`LayerPasses`, :class:`HomeGradients` and
        :class:`PassBinder`.
        """
        before, group = self.layers[-1] if self.layers else None, groups.everyone or groups.expert_parallel
        # Every rank of the group has the loads of the whole group, so only one computes the report.
        journal: list[TransferTimer] | None = [] if self.measure and groups.device == 0 else None
        common = self.strategy, self.clock, self.timer
        local = LocalLayer(context, groups, experts, *common, is_first=before is None, journal=journal)
        checks = {"shares_plans": self.strategy.shares_plans, "checks_plans": self.check_plans}
        planner = self._planners.setdefault(group, LayerPlanner(group, **checks))
        planner.layers.append(local)
        # Passes outside of iterations leave the tables of graphs alone.
        inside, outside = (PassBinder(local, least_slots, slot_multiple) for _ in range(2))
        passes = LayerPasses(local, planner, inside, outside, before.passes if before else None, on_pass)
        gradients = HomeGradients(local, passes, on_home)
        counts = SlotCounts(local, measures_spread=self.measure)
        layer = SlotLayer(passes, gradients, counts)
        if before is not None:
            before.following = layer
        self.layers.append(layer)
        return layer

    def begin_iteration(self, num_micro_batches: int = 0, iteration: int | None = None) -> None:
        """Mark the start of an iteration; its plans are made from the loads of earlier iterations.

        The first layer is planned here. CUDA graphs that contain the remap need its table before they run.
        ``num_micro_batches`` says when sums may leave early; 0 if it is unknown. The number of the iteration
        is for messages. What an iteration that was not ended has left is dropped.
        """
        self.reset_gradients()
        self.clock.is_open = self.clock.driven = self.clock.trains = True
        self.clock.num_micro_batches, self.clock.iteration = num_micro_batches, iteration
        if self.measure and self.layers:
            self.timer.start(is_cuda=self.layers[0].local.experts.device.type == "cuda")
        if self.layers and self.layers[0].local.context.num_devices > 1:
            self.layers[0].passes.plan_iteration()

    def expect(self, num_micro_batches: int) -> None:
        """Announce more micro-batches of the running iteration."""
        self.clock.num_micro_batches += num_micro_batches

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Surround forward passes that have no backward passes.

        Replicas that it gathered outside of an iteration are dropped at the end, plans stay.
        """
        before = self.clock.driven, self.clock.trains
        self.clock.driven, self.clock.trains = not self.clock.is_open, False
        try:
            yield
        finally:
            self.clock.driven, self.clock.trains = before
            if not self.clock.is_open:
                for layer in self.layers:
                    layer.reset()

    def drop_plans(self) -> None:
        """Forget the plans that an evaluation has made, because what they depend on changes."""
        for layer in self.layers:
            layer.drop_plan()

    def reset_gradients(self) -> None:
        """Drop gradients, counts and weights of an iteration that was not ended; its plans stay."""
        for of_group in self._counts:
            of_group.drop()
        self._counts.clear()
        for layer in self.layers:
            layer.reset()
        self.timer.stop()
        self.clock.is_open = self.clock.driven = self.clock.trains = False

    def finish_gradients(self) -> None:
        """Bring all replicas' gradients to the owners; every rank calls it between two backward passes."""
        for layer in reversed(self.layers):
            layer.gradients.finish()

    def end_passes(self) -> None:
        """Start to share the counts of the iteration; every rank calls it after the last backward pass."""
        by_group: dict[dist.ProcessGroup, list[SlotLayer]] = {}
        for layer in self.layers:
            # A single device needs its loads for reports only.
            if self.measure or layer.groups.num_devices > 1:
                by_group.setdefault(layer.groups.expert_parallel, []).append(layer)
        self._counts = [_SharedCounts(layers, self._num_shared) for layers in by_group.values()]

    def end_iteration(self) -> list[LayerLoad]:
        """Mark the end of an iteration; return what each layer did in it, in the order of registration.

        Raises:
            RuntimeError: The ranks have not made the same plans, or gradients are not at their owners.
        """
        counts, self._counts = self._counts, []
        for of_group in counts:
            of_group.take()
        self.clock.is_open = self.clock.driven = self.clock.trains = False
        self.timer.stop()
        loads = [layer.end_iteration() for layer in self.layers]
        self.clock.num_micro_batches, self.clock.iteration = 0, None
        return loads


_DISAGREEMENTS = {
    "plans": "run again with FSSDP_CHECK_PLANS=1 to find the layer, and look for loads, settings or random "
    "numbers that differ between ranks",
    "numbers of passes or slots": "all ranks of an expert-parallel group must run each layer equally often",
}
"""What has a digest of 8 bytes before the counts, and what to do if ranks differ in it."""


class _SharedCounts:
    """The counts of the layers of one group of ranks, and digests of their plans, on their way to all ranks.

    One small all-gather in an iteration starts after the last backward pass, and its results are used when
    the optimizer has stepped. On CUDA, a second stream copies them to pinned memory, so the host waits for
    nothing: by then the device has long computed the norm of the gradients, for which the optimizer waits
    anyway. All ranks have the same ``layers`` in the same order.

    A gather must take equally many numbers from each rank, and ranks that disagree have more or fewer. So
    they gather as many as ever before, ``num_shared`` by the group, and the rest when all are
    known to have it: in the first iteration, and where more passes or slots come than ever.
    """

    def __init__(self, layers: Sequence[SlotLayer], num_shared: dict[dist.ProcessGroup, int]) -> None:
        self._layers, self._num_shared = layers, num_shared
        groups = layers[0].groups
        self._group = groups.everyone or groups.expert_parallel
        numbers = [layer.counts.to_share(layer.passes.shared) for layer in layers]
        self._lengths = [0 if own is None else own.numel() for own in numbers]
        plans, lengths = (hashlib.blake2b(digest_size=8) for _ in _DISAGREEMENTS)
        for layer, length in zip(layers, self._lengths, strict=True):
            if layer.passes.shared is not None:
                plans.update(layer.passes.shared.digest)
                lengths.update(b"%d of %d," % (length, layer.passes.shared.num_slots))
        digests = torch.frombuffer(bytearray(plans.digest() + lengths.digest()), dtype=torch.int32)
        begin = sent_to(digests, layers[0].local.experts.device)
        self._own = torch.cat([begin, *(own for own in numbers if own is not None)])
        self._size = num_shared.setdefault(self._group, begin.numel())
        sent = torch.nn.functional.pad(self._own, (0, self._size - self._own.numel()))  # or the first of them
        self._gathered = start_counts(sent, self._group)

    def drop(self) -> None:
        """Give the numbers up. Messages on the CPU must end first, or gloo cannot go on."""
        wait_for(self._gathered.works)

    def take(self) -> None:
        """Give every layer the numbers of all ranks, which must have made the same plans and passes."""
        numbers_SN = self._gathered.wait()[0].numpy()
        for at, (kind, advice) in enumerate(_DISAGREEMENTS.items()):
            digest_SN = numbers_SN[:, 2 * at : 2 * at + 2]
            differing = np.flatnonzero((digest_SN != digest_SN[0]).any(axis=1)).tolist()
            if differing:
                raise RuntimeError(
                    f"[fssdp] {kind} of iteration {self._layers[0].clock.iteration}: got other {kind} on "
                    f"ranks {differing} of {len(digest_SN)} than on rank 0 (this is rank "
                    f"{self._group.rank()}), wanted the same on all; {advice}"
                )
        if (rest := self._own[self._size :]).numel():
            rest_SN = start_counts(rest, self._group).wait()[0].numpy()
            numbers_SN = np.concatenate([numbers_SN, rest_SN], axis=1)
            self._num_shared[self._group] = self._own.numel()
        begin = 2 * len(_DISAGREEMENTS)
        for layer, length in zip(self._layers, self._lengths, strict=True):
            if length:
                layer.counts.take(numbers_SN[:, begin : begin + length], layer.passes.shared)
            begin += length
