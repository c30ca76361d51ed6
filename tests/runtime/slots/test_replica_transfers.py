"""Transfers of a plan on forked ranks: weights reach the slots, sums reach the owners, whole and in parts."""

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.transfer_lanes import ThreadTransfer
from megatron_fssdp.planning.cost.transfer_split import WHOLE, TransferSplit
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer, two_level_transfer
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout
from megatron_fssdp.runtime.experts.local_experts import LocalExperts
from megatron_fssdp.runtime.slots.owner_gradients import sum_over_holders
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
from megatron_fssdp.strategies.layer_plan import LayerPlan
from megatron_fssdp.testing import run_ranks
from tests.support.random_placement import random_placement

SHAPES = (torch.Size((3, 2)), torch.Size((2, 3)))
NUM_EXPERTS = 6
SPLITS = {"whole": TransferSplit(), "split": TransferSplit(0.4, 0.7), "late": TransferSplit(1.0, 1.0)}


class Bench:
    """Experts, slots and transfers of a random placement on one rank.

    Attributes:
        parts: Elements of every bound transfer, in order.
        num_awaited: Waits for the Parameters of the last optimizer step.
        num_waits: How often waits for transfers were entered.
    """

    def __init__(self, seed, split=WHOLE, *, dtype=torch.float32, main_grad=True, placement=None):
        rng, self.rank, num_devices = np.random.default_rng(seed), dist.get_rank(), dist.get_world_size()
        self.topology, self.layout = Topology.uniform(num_devices, 2), ExpertLayout(SHAPES, dtype)
        self.placement = placement or random_placement(rng, NUM_EXPERTS, num_devices)
        self.parts, self.num_awaited, self.num_waits = [], 0, 0
        owned = np.flatnonzero(self.placement.owner_E == self.rank).tolist()
        self.parameters = {expert: self._expert(expert, main_grad) for expert in owned}
        self.experts = LocalExperts("layer 1", self.parameters, {}, self.layout, self._await)
        self.slots = ReplicaSlots(self.layout, torch.device("cpu"))
        self.transfers = self.of(self.placement, split)

    def of(self, placement, split=WHOLE, **life):
        """Transfers of a plan with the same slots."""
        here = [e for e in placement.experts_on(self.rank) if placement.owner_E[e] != self.rank]
        self.slots.hold(here)
        plan = LayerPlan(placement, two_level_transfer(placement, self.topology), split=split, **life)
        return ReplicaTransfers(
            plan, self.slots, self.experts, self._bind, splits=plan.is_split, waiting=self._waiting
        )

    def _expert(self, expert, main_grad):
        tensors = [torch.nn.Parameter(t) for t in self.layout.unpack(self.weight(expert))]
        for tensor in tensors:
            if main_grad:
                tensor.main_grad = torch.full(tensor.shape, 0.5)
        return tensors

    def weight(self, expert, number=0):
        generator = torch.Generator().manual_seed(100 * number + expert)
        return torch.randn(self.layout.numel, generator=generator).to(self.layout.dtype)

    def _await(self):
        self.num_awaited += 1

    @contextlib.contextmanager
    def _waiting(self):
        self.num_waits += 1
        yield

    def _bind(self, plan, num_elements, dtype):
        self.parts.append(num_elements)
        return SparseTransfer(dist.group.WORLD, plan, num_elements=num_elements, dtype=dtype, device="cpu")

    def assert_present(self, number=0):
        weights = self.slots.weights()
        assert tuple(weights) == self.slots.experts or set(weights) == set(self.slots.experts)
        for expert, flat in weights.items():
            assert torch.equal(flat, self.weight(expert, number)), f"expert {expert}"

    def add_sums(self, number):
        """Add a gradient of this rank to the open sums of each replica."""
        for expert, total in self.slots.sums().items():
            total += self.weight(expert, 10 * number + self.rank + 1).float()

    def wanted(self, expert, numbers):
        """What the replicas on other ranks add to the owner."""
        total = torch.zeros(self.layout.numel, dtype=torch.float64)
        for holder in np.flatnonzero(self.placement.present_ED[expert]):
            if holder != self.placement.owner_E[expert]:
                for number in numbers:
                    total += self.weight(expert, 10 * number + int(holder) + 1).double()
        return total


def gather(rank, world_size, split_name):
    split = SPLITS[split_name]
    for seed in range(4):
        bench = Bench(seed, split)
        numel, transfers, here = bench.layout.numel, bench.transfers, bench.slots.experts
        is_split = split_name != "whole"
        assert bench.slots.held_bytes == 0
        transfers.gather_first_part()
        assert transfers.is_gathered is False
        transfers.gather()
        transfers.gather()  # nothing is sent twice
        early = min(round(split.gather * numel), numel - 1)
        assert bench.parts == ([early, numel - early] if is_split else [numel])
        assert transfers.is_gathered
        transfers.await_weights()
        assert bench.num_awaited == len(bench.parts)
        assert bench.num_waits == 1
        bench.assert_present()
        assert bench.slots.held_bytes == len(here) * numel * 4
        # New values, as after an optimizer step, arrive only with another gather.
        with torch.no_grad():
            for expert, tensors in bench.parameters.items():
                for tensor, value in zip(tensors, bench.layout.unpack(bench.weight(expert, 7)), strict=True):
                    tensor.copy_(value)
        transfers.await_weights()
        bench.assert_present()
        transfers.gather_first_part()
        transfers.release()
        assert bench.slots.held_bytes == 0
        assert not transfers.is_gathered
        transfers.await_weights()
        bench.assert_present(7)
        transfers.release()
        assert bench.slots.held_bytes == 0


@pytest.mark.parametrize("split", SPLITS)
def test_weights_come_are_released_and_come_again(split):
    run_ranks(gather, 4, split)


def use(rank, world_size):
    """Under re-materialization, the memory goes with the last of all users; otherwise it stays."""
    bench = Bench(1)
    for rematerialize in (True, False):
        transfers = bench.of(bench.placement, rematerialize=rematerialize)
        num_bytes = len(bench.slots.experts) * bench.layout.num_bytes

        def check(is_held, transfers=transfers, num_bytes=num_bytes, stays=not rematerialize):
            assert bench.slots.held_bytes == (num_bytes if is_held or stays else 0)
            assert transfers.is_gathered == (is_held or stays)

        for is_prefetched in (True, False):
            for is_backward in (False, True):
                if is_prefetched:
                    transfers.prefetch(backward=is_backward)
                    transfers.prefetch(backward=is_backward)  # by the layer after and by the layer itself
                transfers.begin_use(backward=is_backward)
                transfers.await_weights()
                bench.assert_present()
                transfers.end_use()
                check(False)
        # A forward pass beside a prefetched backward pass, as in a combined 1F1B schedule.
        transfers.prefetch(backward=True)
        transfers.begin_use(backward=False)
        transfers.end_use()
        check(True)
        transfers.begin_use(backward=True)
        transfers.await_weights()
        transfers.end_use()
        check(False)
        transfers.drop()
        assert bench.slots.held_bytes == 0


def test_memory_goes_with_the_last_user():
    run_ranks(use, 4)


def reduce(rank, world_size, split_name, dtype, main_grad):
    for seed in range(4):
        bench = Bench(seed, SPLITS[split_name], dtype=dtype, main_grad=main_grad)
        transfers, numel = bench.transfers, bench.layout.numel
        transfers.open_sums()
        for number in (1, 2):
            transfers.open_sums()
            bench.add_sums(number)
        transfers.reduce(torch.float32)
        late = min(round(SPLITS[split_name].reduce * numel), numel - 1)
        assert not transfers.is_home
        assert bench.parts == ([numel - late, late] if late else [numel])
        if seed % 2:
            transfers.reduce_rest()
        transfers.settle()
        transfers.settle()
        assert transfers.is_home
        assert bench.slots.held_bytes == 0
        for expert, tensors in bench.parameters.items():
            wanted = bench.layout.unpack(bench.wanted(expert, (1, 2)))
            for tensor, want in zip(tensors, wanted, strict=True):
                got = tensor.main_grad - 0.5 if main_grad else tensor.grad
                if got is None:  # no replica
                    assert not want.any()
                else:
                    tolerance = 1e-5 if tensor.dtype is torch.float32 or main_grad else 2e-2
                    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
                assert main_grad == (tensor.grad is None) or got is None
        # The next backward pass begins with zeros, while nothing is on its way.
        transfers.open_sums()
        assert not any(total.any() for total in bench.slots.sums().values())


@pytest.mark.parametrize(
    ("split", "dtype", "main_grad"),
    [
        ("whole", torch.float32, True),
        ("whole", torch.bfloat16, False),
        ("split", torch.bfloat16, True),
        ("split", torch.float32, False),
        ("late", torch.float32, True),
    ],
)
def test_sums_of_several_passes_are_added_to_the_owners_gradient(split, dtype, main_grad):
    run_ranks(reduce, 4, split, dtype, main_grad)


def drop(rank, world_size):
    """A dropped iteration leaves no gradient and no memory, and messages of both kinds were received."""
    waits = []
    original = ThreadTransfer.wait
    ThreadTransfer.wait = lambda one: waits.append(one) or original(one)
    placement = ExpertPlacement(np.arange(NUM_EXPERTS) % world_size, np.ones((NUM_EXPERTS, world_size), bool))
    bench = Bench(0, SPLITS["split"], placement=placement)
    transfers = bench.transfers
    transfers.prefetch(backward=False)
    transfers.drop()
    assert len(waits) == 1
    transfers.gather_first_part()
    transfers.drop()
    assert len(waits) == 2
    transfers.await_weights()
    bench.assert_present()
    transfers.open_sums()
    bench.add_sums(1)
    transfers.reduce(torch.float32)
    waits.clear()
    transfers.drop()
    assert len(waits) == 1
    assert transfers.is_home
    assert bench.slots.held_bytes == 0
    transfers.settle()
    assert all(t.main_grad.eq(0.5).all() for tensors in bench.parameters.values() for t in tensors)
    transfers.await_weights()
    bench.assert_present()


def test_dropping_waits_for_transfers_in_flight_and_adds_nothing():
    run_ranks(drop, 4)


def correct(rank, world_size):
    """Some replicas stay, some go, some come; those that are here serve as sources."""
    rng = np.random.default_rng(0)
    for seed in range(8):
        bench = Bench(seed)
        bench.transfers.await_weights()
        kept = bench.slots.weights()
        present_ED = np.where(bench.placement.present_ED, rng.random((NUM_EXPERTS, world_size)) < 0.6, False)
        present_ED |= rng.random((NUM_EXPERTS, world_size)) < 0.4
        present_ED[np.arange(NUM_EXPERTS), bench.placement.owner_E] = True
        corrected = ExpertPlacement(bench.placement.owner_E, present_ED)
        before = bench.placement
        transfers = bench.of(corrected)
        num_here = len(bench.slots.experts)
        transfers.complete(additional_transfer(before, corrected, bench.topology))
        assert transfers.is_gathered
        bench.assert_present()
        for expert, flat in bench.slots.weights().items():
            assert expert not in kept or flat.data_ptr() == kept[expert].data_ptr()
        assert bench.slots.held_bytes == num_here * bench.layout.numel * 4
        bench.placement = corrected
        transfers.open_sums()
        bench.add_sums(1)
        transfers.reduce(torch.float32)
        transfers.settle()
        for expert, tensors in bench.parameters.items():
            got = bench.layout.pack([t.main_grad - 0.5 for t in tensors]).double()
            torch.testing.assert_close(got, bench.wanted(expert, (1,)), rtol=1e-5, atol=1e-5)


def test_a_corrected_plan_gathers_what_it_adds():
    run_ranks(correct, 4)


def resident(rank, world_size, main_grad):
    for seed in range(4):
        bench = Bench(seed)
        here = bench.placement.experts_on(rank)
        present = {expert: bench._expert(expert, main_grad) for expert in here}
        for expert, tensors in present.items():
            own = bench.layout.unpack(bench.weight(expert, rank + 1))
            for tensor, gradient in zip(tensors, own, strict=True):
                if main_grad:
                    tensor.main_grad.copy_(gradient)
                elif expert % 2:  # others have no gradient
                    tensor.grad = gradient.clone()
        transfer = bench._bind(bench.transfers.plan.transfer, bench.layout.numel, bench.layout.dtype)
        steps = sum_over_holders(transfer, bench.layout, present)
        assert sum(1 for _ in steps) == 2
        for expert, tensors in present.items():
            holders = np.flatnonzero(bench.placement.present_ED[expert])
            has_gradient = main_grad or expert % 2
            wanted = sum(bench.weight(expert, int(h) + 1) for h in holders) if has_gradient else None
            for i, tensor in enumerate(tensors):
                got = tensor.main_grad if main_grad else tensor.grad
                if wanted is None:
                    assert got is None or not got.any()
                else:
                    torch.testing.assert_close(got, bench.layout.unpack(wanted)[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("main_grad", [True, False])
def test_all_holders_of_a_resident_expert_get_the_sum_of_its_gradients(main_grad):
    run_ranks(resident, 4, main_grad)
