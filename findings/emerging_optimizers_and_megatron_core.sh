#!/usr/bin/env bash
# Seven of the twelve optimizers that megatron-core 0.19.2 takes from emerging-optimizers 0.3.0 do not work there.
# megatron-core enters every optimizer of the package under its name, so OptimizerConfig(optimizer="scion") is accepted.
# It gives all of them Adam's betas, which six constructors do not know (TypeError: unexpected keyword argument
# 'betas'). adaptive_muon, a choice of --optimizer, is built, and its first step has an AttributeError: the package
# looks for scale_mode, which megatron-core's subclass does not set.
# Python 3.12, no GPU needed. Seen on 30 November 2026:
#   step: laprop lion muon rekls soap; TypeError: mop muon_hyperball polargrad scion sinkhorn_muon spel;
#   AttributeError: adaptive_muon
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
"$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install 'megatron-core==0.19.2' 'torch==2.15.0' \
  psutil 'emerging-optimizers==0.3.0' absl-py einops || exit 1

cat >"$work/step.py" <<'PY'
import sys
from collections import defaultdict

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS
from megatron.core.transformer import TransformerConfig

torch.cuda.current_device = lambda: "cpu"  # DDP and optimizers ask for a GPU.
make_tensor = torch.tensor
torch.tensor = lambda *values, device=None, **options: make_tensor(*values, **options)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
ends = defaultdict(list)
for name in sorted(_EMERGING_OPTIMIZERS):
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), torch.nn.Linear(8, 8, bias=False))
    try:
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer=name, lr=1e-3, min_lr=0.0), [model])
        for chained in optimizer.chained_optimizers:
            for group in chained.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.randn_like(parameter)
            chained.optimizer.step()
        ends["step"].append(name)
    except (AttributeError, TypeError) as error:
        print(name, error, file=sys.stderr)
        ends[type(error).__name__].append(name)
print("; ".join(f"{end}: {' '.join(ends[end])}" for end in ("step", "TypeError", "AttributeError")))
PY
seen="$(cd "$work" && venv/bin/python -W ignore step.py "$work/store" 2>errors.txt | tail -n 1)"
echo "megatron-core 0.19.2, emerging-optimizers 0.3.0: $seen"
wanted="step: laprop lion muon rekls soap; TypeError: mop muon_hyperball polargrad scion sinkhorn_muon spel;"
wanted+=" AttributeError: adaptive_muon"
[ "$seen" = "$wanted" ] || { tail -n 3 "$work/errors.txt"; echo "changed: expected '$wanted'"; exit 1; }
