#!/usr/bin/env bash
# Megatron-LM cannot report how deterministic a training is. Its command line takes --rerun-mode report_stats, and the
# state machine of megatron-core 0.19.2 calls this mode report_determinism_stats. So the one name ends in a ValueError
# when Megatron starts, and argparse refuses the other. The modes disabled and validate_results have the same names in
# both. A loop of one's own can pass RerunMode.REPORT_DETERMINISM_STATS to initialize_rerun_state_machine().
# Python 3.12, no GPU needed. Seen on 30 November 2026:
#   disabled: parsed, known; validate_results: parsed, known; report_stats: parsed, unknown; report_determinism_stats: refused, known
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
"$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install 'megatron-core==0.19.2' 'torch==2.15.0' \
    psutil || exit 1

cat >"$work/modes.py" <<'PY'
import contextlib
import os
import sys

from megatron.core.rerun_state_machine import RerunMode
from megatron.training.arguments import parse_args

seen = []
for mode in ("disabled", "validate_results", "report_stats", "report_determinism_stats"):
    sys.argv = ["train.py", "--rerun-mode", mode]
    parsed = "parsed"
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        try:
            assert parse_args().rerun_mode == mode
        except SystemExit:
            parsed = "refused"
    try:
        RerunMode(mode)  # as initialize_megatron() does
    except ValueError:
        seen.append(f"{mode}: {parsed}, unknown")
    else:
        seen.append(f"{mode}: {parsed}, known")
print("; ".join(seen))
PY
seen="$(cd "$work" && "$work/venv/bin/python" -W ignore modes.py 2>"$work/errors.txt" | tail -n 1)"
echo "megatron-core 0.19.2: $seen"
wanted="disabled: parsed, known; validate_results: parsed, known; report_stats: parsed, unknown"
wanted="$wanted; report_determinism_stats: refused, known"
[ "$seen" = "$wanted" ] || { tail -n 3 "$work/errors.txt"; echo "changed: expected '$wanted'"; exit 1; }
