#!/usr/bin/env bash
# megatron-core 0.19.2 has a layer specification for multi-latent attention without Transformer Engine
# (get_gpt_layer_local_spec), but no layer can be built from it: the attention passes k_channels and v_channels to its
# core, and the specification's core, DotProductAttention, knows neither. The same specification without multi-latent
# attention builds. Python 3.12, no GPU needed. Seen on 30 November 2026:
#   plain: builds; multi-latent: TypeError, unexpected keyword argument 'k_channels'
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
"$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install \
  'megatron-core==0.19.2' 'torch==2.15.0' psutil || exit 1

cat >"$work/layer.py" <<'PY'
import re
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

torch.cuda.current_device = lambda: "cpu"  # Layers ask for it when they are built.
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}


def outcome(config, **kind):
    try:
        build_module(get_gpt_layer_local_spec(**kind), config=config)
    except TypeError as error:
        return f"TypeError, {re.search(r'unexpected keyword argument .[a-z_]+.', str(error))[0]}"
    return "builds"


latent = MLATransformerConfig(**sizes, **ranks, rope_type="rope", qk_layernorm=True)
print(
    f"plain: {outcome(TransformerConfig(**sizes))}; "
    f"multi-latent: {outcome(latent, multi_latent_attention=True, qk_layernorm=True)}"
)
PY
seen="$(cd "$work" && "$work/venv/bin/python" -W ignore layer.py "$work" 2>"$work/errors.txt" | tail -n 1)"
echo "megatron-core 0.19.2: $seen"
wanted="plain: builds; multi-latent: TypeError, unexpected keyword argument 'k_channels'"
[ "$seen" = "$wanted" ] || { tail -n 3 "$work/errors.txt"; echo "changed: expected '$wanted'"; exit 1; }
