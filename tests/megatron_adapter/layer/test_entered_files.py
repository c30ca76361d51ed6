"""What a forward pass of a layer without replicas runs of this package, beside Megatron's own code."""

import sys
from typing import Any

import torch

from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from .small_config import moe_config

EXPERTS, HIDDEN = 4, 8
EMULATION = ("testing/", "megatron_adapter/cpu/")


def test_a_forward_pass_of_ep_enters_few_files() -> None:
    for entered in run_megatron_ranks(_enter, 2, ep=2):
        assert "megatron_adapter/layer/moe_layer.py" in entered
        assert len(entered) <= 7, sorted(entered)  # With the hooks of the transformer layer, these are 8.


def _enter(rank: int, world_size: int) -> set[str]:
    import megatron_fssdp

    spec = megatron_fssdp.get_moe_module_spec(use_te=False, num_experts=EXPERTS, strategy="ep")
    layer = spec(config=moe_config(world_size, HIDDEN, EXPERTS), pg_collection=None)
    layer.set_layer_number(1)
    clock = layer.slot_layer.clock
    clock.driven, clock.num_micro_batches = True, 2
    hidden = torch.randn(16, 1, HIDDEN, requires_grad=True)
    layer(hidden)[0].sum().backward()  # Makes the plan of the iteration.
    entered = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        folder, _, file = frame.f_code.co_filename.rpartition("megatron_fssdp/")
        if event == "call" and folder and not file.startswith(EMULATION):
            entered.add(file)

    sys.setprofile(note)
    layer(hidden)
    sys.setprofile(None)
    return entered
