#!/usr/bin/env bash
# swift/rlhf_trainers/utils.py of ms-swift 4.6.0 imports msgspec, which ms-swift does not require. After pip install
# ms-swift, this module cannot be imported, nor can its users (megatron rlhf, GRPO); with msgspec, it can. Python 3.12,
# no GPU needed. Seen on 29 November 2026:
#   without msgspec: ModuleNotFoundError: No module named 'msgspec'; with it: imported
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
import_utils() {
  (cd "$work" && "$work/venv/bin/python" -W ignore -c 'import swift.rlhf_trainers.utils; print("imported")' 2>&1 |
    tail -n 1)
}

pip install 'ms-swift==4.6.0' 'torch==2.15.0' || exit 1
without="$(import_utils)"
pip install msgspec || exit 1
with="$(import_utils)"
echo "ms-swift 4.6.0: without msgspec: $without; with it: $with"
[[ "$without" == *"No module named 'msgspec'"* ]] || { echo "changed: another answer without msgspec"; exit 1; }
[[ "$with" == imported ]] || { echo "changed: another answer with msgspec"; exit 1; }
