#!/usr/bin/env bash
# A model of which only the experts train (LoRA on experts, everything else frozen) trains under megatron-core 0.19.2,
# and its optimizer cannot be saved. The optimizer is a chain: a stub for the dense parameters, and one for experts.
# Each member knows that it can be a stub, but the chain's state_dict and sharded_state_dict look into all members, and
# have an AttributeError at the stub. If only the dense parameters train, there is no stub, and both work.
# Python 3.12, no GPU needed. Seen on 30 November 2026:
#   all: 2 members, saved saved; dense: 1 members, saved saved; experts: 2 members, AttributeError AttributeError
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
"$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install 'megatron-core==0.19.2' 'torch==2.15.0' \
  psutil einops || exit 1

cat >"$work/save.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

torch.cuda.current_device = lambda: "cpu"  # DDP and optimizers ask for a GPU.
make_tensor = torch.tensor
torch.tensor = lambda *values, device=None, **options: make_tensor(*values, **options)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
ends = []
for trained in ("all", "dense", "experts"):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in ("dense", "experts")})
    for name, part in model.items():
        part.requires_grad_(trained in ("all", name))
    for parameter in model["experts"].parameters():
        parameter.allreduce = False  # As Megatron marks parameters of experts.
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=0.0), [wrapped])
    saved = []
    for save in (optimizer.state_dict, lambda: optimizer.sharded_state_dict({}, is_loading=False)):
        try:
            save()
            saved.append("saved")
        except AttributeError as error:
            print(trained, error, file=sys.stderr)
            saved.append("AttributeError")
    ends.append(f"{trained}: {len(optimizer.chained_optimizers)} members, {' '.join(saved)}")
print("; ".join(ends))
PY
seen="$(cd "$work" && venv/bin/python -W ignore save.py "$work/store" 2>errors.txt | tail -n 1)"
echo "megatron-core 0.19.2: $seen"
wanted="all: 2 members, saved saved; dense: 1 members, saved saved; experts: 2 members, AttributeError AttributeError"
[ "$seen" = "$wanted" ] || { tail -n 3 "$work/errors.txt"; echo "changed: expected '$wanted'"; exit 1; }
