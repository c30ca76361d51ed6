#!/usr/bin/env bash
# Checks this node with GPUs from start to end: doctor, GPU tests, losses of all strategies on all GPUs, benchmarks
# with traces. Writes one page and one zip to attach to a bug report. Exit code 1 if a step failed.
# usage: bash scripts/gpu_check.sh [--virtual] [--step NAME]... [--out DIR] [--python PYTHON] [--bundle DIR]
#   --virtual        uses CPU processes that pose as CUDA devices, instead of GPUs
#   --step NAME      runs only this step, such as gpu_kernels
#   --out DIR        output folder (default: runs/gpu_check)
#   --python PYTHON  uses an interpreter that has torch, Megatron, pytest and the other packages of pyproject.toml,
#                    for example that of a container; without it, the script makes .venv and installs everything
#   --bundle DIR     takes what the interpreter of --python lacks from a folder of scripts/offline_bundle.sh: only
#                    torch has to be there, and no network is used
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

python="" bundle=""
arguments=()
while (($#)); do
  case "$1" in
    --python)
      python="${2:?--python needs the path of an interpreter}"
      shift 2
      ;;
    --bundle)
      bundle="${2:?--bundle needs the path of a folder}"
      shift 2
      ;;
    *)
      arguments+=("$1")
      shift
      ;;
  esac
done

if [[ -n "$bundle" ]]; then
  python="${python:-python3}"
  if ! said="$("$python" -c 'import torch' 2>&1)"; then
    echo "error: --python $python: got no torch (${said##*$'\n'}), wanted an interpreter with torch; give another" >&2
    exit 2
  fi
  bundle="$(realpath "$bundle")"
  "$python" "$ROOT/scripts/unpack_bundle.py" "$bundle" || exit 2
  export PYTHONPATH="$bundle/site-packages${PYTHONPATH:+:$PYTHONPATH}"
elif [[ -z "$python" ]]; then
  prepare_environment
  python="$VENV_PYTHON"
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m scripts.gpu_check --root "$ROOT" "${arguments[@]}"
