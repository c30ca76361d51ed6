#!/usr/bin/env bash
# The wheel of verl 0.9.1 installs top-level packages "tests" and "scripts" beside verl. A project whose own
# tests are a folder without __init__.py then imports verl's instead, although its folder comes first on the path,
# because regular packages win over namespace packages. Any Python 3.12, no GPU. Seen on 29 November 2026:
#   before: own; after: No module named 'tests.own'
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
mkdir -p "$work/project/tests"
echo 'print("own")' >"$work/project/tests/own.py"
import_own() { (cd "$work/project" && "$work/venv/bin/python" -c 'import tests.own' 2>&1 | tail -n 1); }

before="$(import_own)"
"$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps 'verl==0.9.1' || exit 1
after="$(import_own)"
echo "verl 0.9.1: before: $before; after: $after"
[[ "$before" == own ]] || { echo "changed: the project's own tests were not imported"; exit 1; }
[[ "$after" == *"No module named 'tests.own'" ]] || { echo "changed: verl hides no tests"; exit 1; }
