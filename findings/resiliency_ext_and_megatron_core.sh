#!/usr/bin/env bash
# With nvidia-resiliency-ext 0.4.1 installed, megatron-core 0.19.2 cannot be imported. Without it, it can.
# Both come from the public registry, and neither declares a conflict. Python 3.12, no GPU needed. Seen on
# 28 November 2026: AttributeError: module 'nvidia_resiliency_ext' has no attribute '__version__'
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
import_core() { (cd "$work" && "$work/venv/bin/python" -W ignore -c 'import megatron.core.dist_checkpointing' 2>&1); }

pip install 'megatron-core==0.19.2' 'torch==2.15.0' psutil || exit 1
import_core >"$work/without.txt" || { tail -n 3 "$work/without.txt"; echo "changed: it fails without the extension"; exit 1; }
pip install --no-deps 'nvidia-resiliency-ext==0.4.1' || exit 1
if import_core >"$work/with.txt"; then
  echo "changed: megatron-core 0.19.2 is imported beside nvidia-resiliency-ext 0.4.1"
  exit 1
fi
echo "megatron-core 0.19.2 beside nvidia-resiliency-ext 0.4.1:"
tail -n 1 "$work/with.txt"
grep -q "no attribute '__version__'" "$work/with.txt" || { echo "changed: another error"; exit 1; }
