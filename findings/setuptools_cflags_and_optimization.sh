#!/usr/bin/env bash
# setuptools 84.2.1 compiles extension modules without optimization where CFLAGS is set, whatever is in it. Its value
# takes the place of the interpreter's own flags, which have -O3 (-O2 counts as -O3 here). setuptools 74.1.3 added it to
# them. So a CFLAGS that asks for one warning or one -march makes modules that Cython translated several times slower:
# the search of this project's planner took 94 ms in place of 14, until its setup.py asked for -O3 itself. Nothing warns.
# Python 3.12 and a C compiler, no GPU needed. Seen on 30 November 2026:
#   setuptools 74.1.3: without CFLAGS -O3, with CFLAGS -O3; setuptools 84.2.1: without CFLAGS -O3, with CFLAGS none
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install)

cat >"$work/part.c" <<'C'
#include <Python.h>
static struct PyModuleDef part = {PyModuleDef_HEAD_INIT, "part", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_part(void) { return PyModule_Create(&part); }
C
cat >"$work/setup.py" <<'PY'
from setuptools import Extension, setup

setup(name="part", version="1", ext_modules=[Extension("part", ["part.c"])])
PY
# The last -O counts for the compiler.
level() {
  (cd "$work" && rm -rf build && "$@" venv/bin/python setup.py build_ext 2>>errors.txt) |
    grep -e '-c part.c' | grep -oe ' -O[0-9sg]*' | tail -n 1 | sed 's/ //; s/-O[23]/-O3/' | grep . || echo none
}
seen=""
for version in 74.1.3 84.2.1; do
  "${pip[@]}" "setuptools==$version" || exit 1
  seen+="setuptools $version: without CFLAGS $(level env -u CFLAGS), with CFLAGS $(level env CFLAGS=-Wall); "
done
seen="${seen%; }"
echo "$seen"
wanted="setuptools 74.1.3: without CFLAGS -O3, with CFLAGS -O3; setuptools 84.2.1: without CFLAGS -O3, with CFLAGS none"
[ "$seen" = "$wanted" ] || { tail -n 3 "$work/errors.txt"; echo "changed: expected '$wanted'"; exit 1; }
