#!/usr/bin/env bash
# Router traces of megatron-core 0.19.2 (RouterTracer) do not say which line is a recomputed pass, nor which
# model chunk a layer belongs to. With full recomputation each decision is written twice, with equal fields. With
# virtual pipeline stages two layers of different chunks have the same "block" and "layer", because the number is
# that of the module's name inside its chunk, not the layer's number in the model. Who adds up the lines counts
# tokens twice, or takes two layers for one. Python 3.12, no GPU needed. Seen on 28 November 2026:
#   one pass: 1 line; recomputed: 2 equal lines; layers 1 and 3 of two chunks: decoder 0, decoder 0
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
"$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install \
  'megatron-core==0.19.2' 'torch==2.15.0' psutil || exit 1

cat >"$work/trace.py" <<'PY'
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_trace import RouterTracer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

# The router brings its weights to the current device, and the tracer asks for the capture of graphs.
torch.cuda.current_device, torch.cuda.is_current_stream_capturing = lambda: "cpu", lambda: False
folder = Path(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=4, hidden_size=8, num_attention_heads=1, num_moe_experts=4, moe_router_topk=2,
    moe_router_load_balancing_type="none", use_cpu_initialization=True,
)


class Layer(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.router = TopKRouter(config, pg_collection=groups)
        self.router.set_layer_number(number)

    def forward(self, hidden):
        probs, routing_map = self.router(hidden)
        return hidden * probs.sum()


def chunk(*numbers):
    module = torch.nn.Module()
    module.decoder = torch.nn.Module()
    module.decoder.layers = torch.nn.ModuleList(Layer(number) for number in numbers)
    return module


def traced(name, chunks, recomputes):
    tracer = RouterTracer(str(folder / name), 8, 0, training_mode=True)
    tracer.register_hooks(chunks)
    hidden = torch.randn(3, 1, 8, requires_grad=True)
    for module in chunks:
        for layer in module.decoder.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if recomputes else layer(hidden)
    hidden.sum().backward()
    tracer.advance_step(step_id=1)
    tracer.remove_hooks()
    return [json.loads(line) for line in (folder / name / "router_trace_rank0.jsonl").read_text().splitlines()]


once, twice = traced("once", [chunk(1)], False), traced("twice", [chunk(1)], True)
chunks = traced("chunks", [chunk(1), chunk(3)], False)
places = ", ".join(f"{line['block']} {line['layer']}" for line in chunks)
equal = "equal" if all(line == twice[0] for line in twice) else "different"
print(f"one pass: {len(once)} line; recomputed: {len(twice)} {equal} lines; layers 1 and 3 of two chunks: {places}")
PY
seen="$(cd "$work" && "$work/venv/bin/python" -W ignore trace.py "$work" 2>"$work/errors.txt" | tail -n 1)"
echo "megatron-core 0.19.2: $seen"
wanted="one pass: 1 line; recomputed: 2 equal lines; layers 1 and 3 of two chunks: decoder 0, decoder 0"
[ "$seen" = "$wanted" ] || { tail -n 3 "$work/errors.txt"; echo "changed: expected '$wanted'"; exit 1; }
