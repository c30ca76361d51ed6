#!/usr/bin/env bash
# A worker of verl 0.9.1 under Ray gets RAY_LOCAL_WORLD_SIZE, the number of workers on its node. It reads
# LOCAL_WORLD_SIZE, which Ray's launch does not set, takes it for 1, and writes that to its environment. Code in the
# worker that trusts torchrun's names then takes each of the node's 8 GPUs for a node of its own, with the slow links
# between nodes in between. torchrun hides this, as it sets both. No GPU, no cluster: a worker is made with the
# variables that verl's RayWorkerGroup gives. Seen on 29 November 2026:
#   RAY_LOCAL_WORLD_SIZE=8 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0, for rank 3
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
python="$work/venv/bin/python"
"$python" -m pip --disable-pip-version-check --quiet install 'torch==2.15.0' 'ray==2.60.0' 'tensordict==0.10.0' \
    'transformers==5.12.1' 'omegaconf==2.3.1' 'psutil==7.2.2' || exit 1
"$python" -m pip --disable-pip-version-check --quiet install --no-deps 'verl==0.9.1' || exit 1
cat >"$work/worker.py" <<'END'
import os

from verl.single_controller.base.worker import Worker

Worker()
names = "RAY_LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"
print(*(f"{name}={os.environ.get(name)}" for name in names))
END
seen="$(WORLD_SIZE=16 RANK=3 RAY_LOCAL_WORLD_SIZE=8 WG_BACKEND=ray WG_PREFIX=workers MASTER_ADDR=127.0.0.1 \
    MASTER_PORT=29500 "$python" "$work/worker.py" 2>"$work/errors")" || { tail -n 5 "$work/errors"; exit 1; }
echo "verl 0.9.1: $seen"
[[ "$seen" == "RAY_LOCAL_WORLD_SIZE=8 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0" ]] || { echo "changed"; exit 1; }
