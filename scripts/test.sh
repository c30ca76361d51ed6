#!/usr/bin/env bash
# Installs the project, then runs ruff, mypy and pytest. usage: bash scripts/test.sh [PYTEST ARGUMENTS…]
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare_environment || exit 1
cd "$ROOT" || exit 1
status=0

check() {
  echo "$1"
  "$VENV_PYTHON" -m "${@:2}" || { echo "$1 failed" && status=1; }
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy
# Each worker imports torch and Megatron for its own ranks (1 GiB), so many cores do not mean many workers.
"$VENV_PYTHON" -m pytest -n logical --maxprocesses 4 --dist loadfile "$@" || status=1
exit "$status"
