#!/usr/bin/env bash
# megatron-core 0.19.2 loads no distributed checkpoint with torch 2.15.0 unless --dist-ckpt-strictness has its default.
# All other values, also ignore_all and log_all, which only report, first read the sizes of the saved tensors
# (dist_checkpointing.load_tensors_metadata). This hands all fields of torch's TensorProperties on to torch.empty, and
# torch 2.15 has a new field, strides. Under torch 2.14.1 all of them load. Python 3.12, no GPU needed.
# Seen on 30 November 2026:
#   torch 2.15.0: assume_ok_unexpected loads, the other seven: TypeError, unexpected keyword argument 'strides'
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install)
"${pip[@]}" 'megatron-core==0.19.2' 'torch==2.15.0' psutil || exit 1

cat >"$work/load.py" <<'PY'
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling


def state():
    return {"weight": dist_checkpointing.ShardedTensor.from_rank_offsets("weight", torch.ones(4))}


def main():
    folder = Path(sys.argv[1])
    (folder / "checkpoint").mkdir()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None  # A save asks for them.
    dist_checkpointing.save(state(), str(folder / "checkpoint"))
    seen = {}
    for strictness in sorted(StrictHandling, key=lambda mode: mode.value):
        try:
            dist_checkpointing.load(state(), str(folder / "checkpoint"), strict=strictness)
            end = "loads"
        except TypeError as error:
            end = f"TypeError, {str(error).partition('an ')[2]}"
        seen.setdefault(end, []).append(strictness.value)
    print("; ".join(f"{' '.join(names)}: {end}" for end, names in seen.items()))


if __name__ == "__main__":
    main()
PY
seen="$(cd "$work" && "$work/venv/bin/python" -W ignore load.py "$work" 2>"$work/errors.txt" | tail -n 1)"
echo "megatron-core 0.19.2, torch 2.15.0: $seen"
wanted="assume_ok_unexpected: loads; ignore_all log_all log_unexpected raise_all raise_unexpected return_all\
 return_unexpected: TypeError, unexpected keyword argument 'strides'"
[ "$seen" = "$wanted" ] || { tail -n 3 "$work/errors.txt"; echo "changed: expected '$wanted'"; exit 1; }
