"""Replicas' memory is not given back while a transfer uses it."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout
from megatron_fssdp.runtime.replicas.replica_weights import ReplicaWeights, WeightState

ELEMENTS = 10


class Pending:
    """A transfer that ends when it is awaited."""

    def __init__(self, out: Mapping[int, Tensor]) -> None:
        self.out = out
        self.is_over = False

    def wait(self) -> dict[int, Tensor]:
        for tensor in self.out.values():
            assert tensor.untyped_storage().nbytes(), "the memory went before the transfer was over"
            tensor.fill_(1.0)
        self.is_over = True
        return dict(self.out)


class Transfer:
    """A part of a gather that brings one replica, of expert 1."""

    shared_experts = ()
    received_experts = (1,)
    device = torch.device("cpu")

    def __init__(self, num_elements: int) -> None:
        self.num_elements = num_elements
        self.started: list[Pending] = []

    def start_all_gather(self, owned: Mapping[int, Tensor], *, out: Mapping[int, Tensor]) -> Pending:
        self.started.append(Pending(out))
        return self.started[-1]


def weights_and_transfers(*parts: int) -> tuple[ReplicaWeights, list[Transfer]]:
    layout = ExpertLayout.of([torch.zeros(ELEMENTS)])
    weights = ReplicaWeights(layout, {})
    transfers = [Transfer(num_elements) for num_elements in parts]
    for transfer in transfers:
        weights.start(cast(Any, transfer))
    return weights, transfers


def test_a_release_between_two_parts_waits_for_the_first_one() -> None:
    weights, (transfer,) = weights_and_transfers(4)
    assert weights.state is WeightState.GATHERING
    weights.release()
    assert [pending.is_over for pending in transfer.started] == [True]
    assert (weights.state, weights.held_bytes, weights.num_missing) == (WeightState.OWNED, 0, ELEMENTS)
    whole = Transfer(ELEMENTS)
    weights.start(cast(Any, whole))
    (tensor,) = weights.tensors([1])
    assert tensor.eq(1.0).all()


def test_settling_waits_for_the_parts_that_have_started_and_lets_the_rest_follow() -> None:
    weights, (transfer,) = weights_and_transfers(4)
    weights.settle()
    assert transfer.started[0].is_over
    assert weights.num_missing == 6
    with pytest.raises(RuntimeError, match="6 elements not gathered yet"):
        weights.wait()
    rest = Transfer(6)
    weights.start(cast(Any, rest))
    weights.wait()
    assert rest.started[0].is_over
    assert weights.state is WeightState.MATERIALIZED
