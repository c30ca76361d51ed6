#!/usr/bin/env bash
# Trains a small GPT-MoE on four CPU ranks twice, with plain expert parallelism and with FSSDP,
# and compares the device loads. usage: bash scripts/quickstart.sh [FOLDER]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

out="${1:-$ROOT/runs/quickstart}"
config="$ROOT/configs/gpt_moe_tiny.yaml"

prepare_environment
cli=("$VENV/bin/megatron-fssdp")

mkdir -p "$out"
if command -v flock >/dev/null; then
  exec 8>"$out/.lock"
  flock -n 8 || { echo "error: another quickstart is running in $out; give another folder" >&2 && exit 1; }
fi

# Runs of an earlier quickstart are replaced. Other files are never deleted.
for strategy in ep fssdp; do
  if [[ -e "$out/$strategy/config.yaml" ]]; then rm -rf "${out:?}/$strategy"; fi
done

export MEGATRON_FSSDP_DEVICE=cpu
"${cli[@]}" data build --out "$out/data" --vocab-size 2048 --rebuild
for strategy in ep fssdp; do
  "${cli[@]}" train "$config" --moe-strategy "$strategy" --set data.path="$out/data" --out "$out/$strategy"
done

"${cli[@]}" compare "$out/ep" "$out/fssdp" --out "$out/comparison.html"
echo "run folders:  $out/ep"
echo "              $out/fssdp"
echo "all pictures: $out/comparison.html"
