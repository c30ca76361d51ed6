"""Megatron's activation checkpoints, with the exchanges that our layers keep in them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from megatron_fssdp.megatron_adapter.layer.recomputed_layers import keep_exchanges_of_checkpoints
from megatron_fssdp.runtime.execution import kept_exchanges


def test_a_layer_in_megatrons_checkpoint_finds_its_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_get_all_rng_states", "_set_all_rng_states"):  # They need a device.
        monkeypatch.setattr(megatron_random, name, lambda *_: ())
    monkeypatch.setattr(megatron_random, "_fork_rng", nullcontext)
    keep_exchanges_of_checkpoints()
    wrapped = megatron_random.CheckpointFunction.forward
    keep_exchanges_of_checkpoints()
    assert megatron_random.CheckpointFunction.forward is wrapped, "the second call must not wrap again"
    found: list[Any] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        found.append(kept_exchanges.recall("layer"))
        kept_exchanges.keep("layer", found[-1] or object())  # type: ignore[arg-type]
        return x * 2

    leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
    outputs = [megatron_random.checkpoint(layer, False, x) for x in leaves]
    for output in outputs:
        output.sum().backward()
    assert found[:2] == [None, None]
    assert None not in found[2:]
    assert found[2] is not found[3]
    assert [x.grad.tolist() for x in leaves if x.grad is not None] == [[2.0] * 3] * 2
