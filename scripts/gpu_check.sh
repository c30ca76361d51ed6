#!/usr/bin/env bash
# Checks this node with GPUs from start to end: doctor, GPU tests, losses of all strategies on all GPUs, benchmarks
# with traces. Writes one page and one zip to attach to a bug report. Exit code 1 if a step failed.
# usage: bash scripts/gpu_check.sh [--virtual] [--out DIR] [--python PYTHON] [--bundle DIR]
#   --virtual        uses CPU processes that pose as CUDA devices, instead of GPUs
#   --out DIR        output folder (default: runs/gpu_check)
#   --python PYTHON  uses an interpreter that has torch, Megatron, pytest and the other packages of pyproject.toml,
#                    for example that of a container; without it, the script makes .venv and installs everything
#   --bundle DIR     takes what the interpreter of --python lacks from a folder of scripts/offline_bundle.sh: only
#                    torch has to be there, and no network is used
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Unpacks the wheels of a bundle and puts them on the path of Python. Neither pip nor an environment is needed.
unpack_bundle() {
  local said
  if ! said="$("$1" -c 'import torch' 2>&1)"; then
    echo "error: --python $1: got no torch (${said##*$'\n'}), wanted an interpreter with torch; give another one" >&2
    return 1
  fi
  "$1" - "$2" <<'PYTHON_CODE' || return 1
import pathlib, sys, zipfile
bundle = pathlib.Path(sys.argv[1])
wheels, packages = sorted((bundle / "wheels").glob("*.whl")), bundle / "site-packages"
tags = {one.name.split("-")[-3] for one in wheels} - {"py3", "py2.py3"}
own = "cp%d%d" % sys.version_info[:2]
if own not in tags:
    found = ", ".join(sorted(tags)) or "no wheels"
    sys.exit(f"error: --bundle {bundle}: got {found}, wanted wheels for {own}; make the bundle with --python")
if not packages.exists():
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(packages)
PYTHON_CODE
  export PYTHONPATH="$2/site-packages${PYTHONPATH:+:$PYTHONPATH}"
}

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
  unpack_bundle "$python" "$(realpath "$bundle")" || exit 2
elif [[ -z "$python" ]]; then
  prepare_environment
  python="$VENV_PYTHON"
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m scripts.gpu_check --root "$ROOT" "${arguments[@]}"
