"""How much of this package a forward pass of a layer enters under plain expert parallelism."""

import sys
from pathlib import Path

import torch

import megatron_fssdp
from tests.support.training_preload import on_ranks

from .small_config import build_layer, moe_config

ROOT, HIDDEN, TOKENS = Path(megatron_fssdp.__file__).parent, 8, 16


@on_ranks(2, ep=2)
def test_a_forward_pass_under_ep_enters_few_files():
    """Files whose functions run in the second micro-batch of an iteration, without the CPU runtime's."""
    layer = build_layer(moe_config(2, HIDDEN, 4), "ep", {})
    runtime, entered = layer._session.runtime, set[str]()

    def note(frame, event, _):
        if event == "call":
            entered.add(frame.f_code.co_filename)

    runtime.begin_iteration(2)
    for batch in range(2):
        hidden = torch.ones(TOKENS, 1, HIDDEN, requires_grad=True)
        sys.setprofile(note if batch else None)
        runtime.layers[0].launch(hidden)
        output, _ = layer(hidden)
        sys.setprofile(None)
        output.sum().backward()
    own = [Path(file).relative_to(ROOT) for file in entered if Path(file).is_relative_to(ROOT)]
    files = {str(file) for file in own if "cpu" not in file.parts}
    assert "runtime/layers/slot_layer.py" in files
    assert len(files) <= 8, sorted(files)
