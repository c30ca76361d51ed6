#!/usr/bin/env bash
# Megatron-LM loses its log lines at INFO where the package of its Muon, emerging-optimizers 0.3.0, is installed. The
# training loop of megatron-core 0.19.2 asks for INFO and a handler of its own (logging.basicConfig) "before importing
# first-party modules", but its package has imported them by then. With emerging-optimizers, these import absl, which
# logs and so configures logging first; a second basicConfig changes nothing. --logging-level 20 brings the level back,
# the handler (standard output, without torch.distributed's lines) stays lost.
# Python 3.12, no GPU needed. Seen on 30 November 2026:
#   without: CustomHandler at INFO; with emerging-optimizers: StreamHandler at WARNING
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install)
"${pip[@]}" 'megatron-core==0.19.2' 'torch==2.15.0' psutil || exit 1

cat >"$work/handlers.py" <<'PY'
import logging

import megatron.training

kinds = "+".join(type(handler).__name__ for handler in logging.root.handlers)
print(f"{kinds} at {logging.getLevelName(logging.root.level)}")
PY
look() { (cd "$work" && "$work/venv/bin/python" -W ignore handlers.py 2>"$work/errors.txt" | tail -n 1); }
before="$(look)"
"${pip[@]}" 'emerging-optimizers==0.3.0' absl-py einops || exit 1
seen="without: $before; with emerging-optimizers: $(look)"
echo "megatron-core 0.19.2: $seen"
wanted="without: CustomHandler at INFO; with emerging-optimizers: StreamHandler at WARNING"
[ "$seen" = "$wanted" ] || { tail -n 3 "$work/errors.txt"; echo "changed: expected '$wanted'"; exit 1; }
