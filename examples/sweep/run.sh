#!/usr/bin/env bash
# Trains every strategy with every seed and compares all runs on one page. Finished runs are not repeated, so an
# interrupted sweep continues. usage: bash run.sh [CONFIG] [OUT]; STRATEGIES, SEEDS and ITERS change the sweep
set -euo pipefail
config="${1:-gpt_moe_tiny}"
out="${2:-runs/sweep}"
runs=()
for strategy in ${STRATEGIES:-ep fssdp quota}; do
  for seed in ${SEEDS:-1 2}; do
    run="$out/$strategy-seed$seed"
    runs+=("$run")
    if [[ -f "$run/finished" ]]; then continue; fi
    megatron-fssdp train "$config" --moe-strategy "$strategy" --set "training.seed=$seed" \
      --set training.save_checkpoints=false --iters "${ITERS:-60}" --out "$run" --overwrite
    touch "$run/finished"
  done
done
megatron-fssdp compare "${runs[@]}" --out "$out/comparison.html"
