from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fssdp.collectives.sparse import slot_exchange
from megatron_fssdp.collectives.sparse.slot_exchange import SlotQuantity, exchange_slots
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.testing import run_ranks
from tests.drawn_examples import examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Rows(SlotQuantity):
    """A quantity in one tensor [slots, elements] that records which ranges were read."""

    def __init__(self, name, values):
        kind = values.shape[1], values.dtype, values.device
        super().__init__(name, *kind, [[(0, row)] for row in values])
        self.__dict__.update(values=values, reads=[])  # The class is frozen.

    def read(self, slots, start, out_WQ):
        self.reads.append((start, out_WQ.shape[1]))
        super().read(slots, start, out_WQ)


class AllocatedBytes(TorchDispatchMode):
    """Sums the bytes of every new storage, an upper bound of the bytes alive at once."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.total += tensor.untyped_storage().nbytes()
        return result


def random_map(rng, num_layers, num_experts, num_devices):
    places = rng.permutation(num_layers * num_experts).reshape(num_layers, num_experts)
    slots = num_layers * num_experts // num_devices
    return OwnerMap(places // slots, places % slots, num_devices)


def contents(owner_map, device, num_elements, dtype, seed):
    """Contents of a device's slots under a map; they depend only on layer and expert."""
    generator = torch.Generator().manual_seed(seed)
    shape = (owner_map.num_layers, owner_map.num_experts, num_elements)
    of_expert = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    slots_L = [owner_map.slots_on(device, layer) for layer in range(owner_map.num_layers)]
    held = {slot: of_expert[layer, expert] for layer, of in enumerate(slots_L) for expert, slot in of.items()}
    return torch.stack([held[slot] for slot in sorted(held)])


def permute(rank, world_size, cases):
    """Among the first ranks, and then among more and more of them."""
    for size in range(1, world_size + 1):
        group = dist.new_group(list(range(size)))
        if rank < size:
            permute_in(group, cases)


def permute_in(group, cases):
    rank, world_size = group.rank(), group.size()
    for seed, num_layers, experts_per_device, sizes, buffer_bytes in cases:
        rng = np.random.default_rng(seed)
        shape = (num_layers, experts_per_device * world_size, world_size)
        old, new = random_map(rng, *shape), random_map(rng, *shape)
        if seed % 3 == 0:  # only two experts change places, so most devices move nothing
            flat = rng.permutation(old.device_LE.size)[:2]
            device_LE, slot_LE = old.device_LE.copy(), old.slot_LE.copy()
            device_LE.flat[flat], slot_LE.flat[flat] = device_LE.flat[flat[::-1]], slot_LE.flat[flat[::-1]]
            new = OwnerMap(device_LE, slot_LE, world_size)
        kinds = [(size, DTYPES[(seed + i) % len(DTYPES)], seed + i) for i, size in enumerate(sizes)]
        quantities = [Rows(str(i), contents(old, rank, *kind)) for i, kind in enumerate(kinds)]
        moves = old.moves_to(new)
        least = 2 * old.slots_per_device * 8
        for quantity, kind in zip(quantities, kinds, strict=True):
            budget = max(buffer_bytes, least)
            with mock.patch.object(slot_exchange, "BUFFER_BYTES", budget), AllocatedBytes() as allocated:
                exchange_slots(group, moves, [quantity])
            assert allocated.total <= budget
            assert torch.equal(quantity.values, contents(new, rank, *kind))
            covered = [i for start, length in quantity.reads for i in range(start, start + length)]
            assert covered == (list(range(kind[0])) if moves else [])
        calls = [None] * world_size
        dist.all_gather_object(calls, [quantity.reads for quantity in quantities], group)
        assert all(reads == calls[0] for reads in calls), "ranks ran different numbers of collectives"
        # Move all quantities back in one call.
        exchange_slots(group, new.moves_to(old), quantities)
        for quantity, kind in zip(quantities, kinds, strict=True):
            assert torch.equal(quantity.values, contents(old, rank, *kind))


CASES = st.tuples(
    st.integers(0, 10_000),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 70), min_size=1, max_size=3),
    st.integers(1, 2000),
)


# Shrinking a failing example would start ranks for minutes.
@examples(3, phases=[Phase.generate])
@given(cases=st.lists(CASES, min_size=3, max_size=6))
def test_contents_arrive_within_the_memory_budget(cases):
    run_ranks(permute, 4, cases)
