#!/usr/bin/env bash
# megatron-core 0.19.2 cannot load an optimizer's state after --lr or --min-lr has changed. The highest and the lowest
# learning rate of a parameter group are part of the key by which groups of a checkpoint are found again, and each group
# has them. So --override-opt_param-scheduler, whose purpose is a resume with other rates, ends before the scheduler is
# reached. (The distributed optimizer has a bare KeyError.) megatron-core 0.18.0 loads the same state.
# Python 3.12, no GPU needed. Seen on 30 November 2026:
#   0.18.0: same lr loads, another lr loads; 0.19.2: same lr loads, another lr ValueError
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install)

cat >"$work/resume.py" <<'PY'
import copy
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


def optimizer(lr):
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), torch.nn.Linear(4, 4))
    return get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=lr, min_lr=0.0), [model])


saved = optimizer(1e-3).state_dict()
for name, lr in (("same lr", 1e-3), ("another lr", 5e-4)):
    try:
        optimizer(lr).load_state_dict(copy.deepcopy(saved))
        end = "loads"
    except (KeyError, ValueError) as error:
        end = type(error).__name__
    print(name, end, end=", " if name == "same lr" else "\n")
PY
seen=""
for version in 0.18.0 0.19.2; do
  "${pip[@]}" "megatron-core==$version" 'torch==2.14.1' psutil || exit 1
  seen+="$version: $(cd "$work" && rm -f store && venv/bin/python -W ignore resume.py "$work/store" 2>>errors.txt | tail -n 1); "
done
seen="${seen%; }"
echo "megatron-core $seen"
wanted="0.18.0: same lr loads, another lr loads; 0.19.2: same lr loads, another lr ValueError"
[ "$seen" = "$wanted" ] || { tail -n 3 "$work/errors.txt"; echo "changed: expected '$wanted'"; exit 1; }
