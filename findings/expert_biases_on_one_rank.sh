#!/usr/bin/env bash
# megatron-core 0.19.2 cannot train an MoE layer of sequential experts with biases, its default, on one rank (no expert
# and no tensor parallelism). The second matrix's output passes a reduction over one rank, which returns its input, and
# the bias is then added in place to it; torch 2.15.0 forbids this for a view that a custom function has returned. Without
# gradients, or without biases, the same layer works; with two expert-parallel ranks, experts skip that reduction.
# Python 3.12, no GPU needed. Seen on 29 November 2026:
#   biases: RuntimeError; biases without gradients: works; no biases: works
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
"$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install \
  'megatron-core==0.19.2' 'torch==2.15.0' psutil || exit 1

cat >"$work/layer.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.current_device = lambda: "cpu"  # where Megatron puts its tensors
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
parallel_state.initialize_model_parallel()


def outcome(biases, gradients):
    config = TransformerConfig(
        num_layers=1, hidden_size=8, ffn_hidden_size=16, num_attention_heads=1, num_moe_experts=4, moe_router_topk=2,
        add_bias_linear=biases, use_cpu_initialization=True,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    matrices = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = SequentialMLP(4, config, matrices, pg_collection=groups)
    rows, row_probs = torch.randn(8, 8, requires_grad=True), torch.full((8,), 0.5)
    try:
        with torch.set_grad_enabled(gradients):
            output, _ = experts(rows, torch.tensor([2, 2, 2, 2]), row_probs)
            if gradients:
                output.sum().backward()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return "RuntimeError"
    return "works"


found = outcome(True, True), outcome(True, False), outcome(False, True)
print("biases: {}; biases without gradients: {}; no biases: {}".format(*found))
PY
seen="$(cd "$work" && "$work/venv/bin/python" -W ignore layer.py "$work" 2>"$work/errors.txt" | tail -n 1)"
echo "megatron-core 0.19.2: $seen"
wanted="biases: RuntimeError; biases without gradients: works; no biases: works"
[ "$seen" = "$wanted" ] || { tail -n 3 "$work/errors.txt"; echo "changed: expected '$wanted'"; exit 1; }
