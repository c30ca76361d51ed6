#!/usr/bin/env bash
# Builds sdist and wheel, installs only the wheel into an empty environment, and uses it in a folder that is not a
# checkout: commands, the launcher, three iterations of a shipped run on CPU ranks. It takes some minutes and about 6 GB
# below $TMPDIR, which are freed at the end. usage: bash scripts/smoke_test_package.sh
# exit: 0 everything worked; otherwise the last step that was printed failed
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

python="$(find_python)"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH # so that only installed packages are imported

step() { echo "== $1"; }

step "python -m build: an sdist, and a wheel from it"
"$python" -m venv "$folder/builder"
"$folder/builder/bin/pip" install --quiet --disable-pip-version-check build
"$folder/builder/bin/python" -m build --outdir "$folder/dist" "$ROOT" >"$folder/build.log" 2>&1 || {
  tail -n 20 "$folder/build.log" >&2
  exit 1
}
ls "$folder/dist"

step "pip install WHEEL, into an empty environment: enough for the launcher"
"$python" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --disable-pip-version-check dist/*.whl
venv/bin/pip check
venv/bin/python -c 'import megatron_fssdp; megatron_fssdp.register()'
code=0
venv/bin/megatron-fssdp --help 2>hint.txt || code=$?
[[ $code == 2 ]] && grep "pip install 'megatron-fssdp\[tools\]'" hint.txt

step "pip install 'WHEEL[tools]'"
venv/bin/pip install --quiet --disable-pip-version-check "$(ls dist/*.whl)[tools]"
venv/bin/pip check

step "imports, with type information and without torch"
venv/bin/python - <<'PYTHON_CODE'
import sys
from importlib.resources import files

import megatron_fssdp

assert (files(megatron_fssdp) / "py.typed").is_file()
assert "site-packages" in str(megatron_fssdp.__file__), megatron_fssdp.__file__
assert "torch" not in sys.modules
print(megatron_fssdp.__version__)
PYTHON_CODE

step "megatron-fssdp --help, --version, configs"
venv/bin/megatron-fssdp --help
venv/bin/megatron-fssdp --version
venv/bin/megatron-fssdp configs | tail -n 3

step "megatron-fssdp doctor --config gpt_moe_tiny"
export MEGATRON_FSSDP_DEVICE=cpu
venv/bin/megatron-fssdp doctor --config gpt_moe_tiny

step "planning kernels, compiled if there is a C compiler"
form="$(venv/bin/python -c 'from megatron_fssdp.planning.compiled_form import kernel_form; print(kernel_form())')"
echo "$form"
if [[ $form != compiled ]] && command -v gcc >/dev/null; then exit 1; fi

step "python -m megatron_fssdp, without a script"
code=0
venv/bin/python -m megatron_fssdp || code=$?
((code == 2)) || { echo "got exit code $code, expected 2" >&2 && exit 1; }

step "megatron-fssdp train gpt_moe_tiny, 3 iterations of fssdp"
venv/bin/megatron-fssdp train gpt_moe_tiny --moe-strategy fssdp --iters 3 --set training.lr_warmup_iters=0 \
  --set data.tokenizer=bytes --set data.vocab_size=257 --out run
(($(wc -l <run/metrics.jsonl) == 3)) || { echo "run/metrics.jsonl does not have 3 iterations" >&2 && exit 1; }

step "megatron-fssdp simulate"
venv/bin/megatron-fssdp simulate --loads run --cluster hecate-a --model gpt_moe_tiny --no-plots --out what-if

step "pip install SDIST"
wanted="$(venv/bin/megatron-fssdp --version)"
venv/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/*.tar.gz
[[ "$(venv/bin/megatron-fssdp --version)" == "$wanted" ]] || { echo "the sdist has another version than the wheel" >&2 && exit 1; }

echo "the package works: $wanted"
