#!/usr/bin/env bash
# Trains a small GPT-MoE on four CPU ranks on your own text. usage: bash run.sh [TEXT.jsonl] [OUT]
# The file has one JSON object per line, with the text of a document under the key "text", as Megatron-LM's tools want.
set -euo pipefail
out="${2:-runs/own_data}"
if [[ $# -gt 0 ]]; then
  text="$1"
else
  mkdir -p "$out"
  text="$out/example.jsonl"
  for number in {1..400}; do
    echo "{\"text\": \"Document $number says that $number and $number make $((2 * number)).\"}"
  done >"$text"
fi
megatron-fssdp data build "$text" --tokenizer bpe --vocab-size 512 --out "$out/data"
megatron-fssdp train gpt_moe_tiny --set "data.path=$out/data" --iters "${ITERS:-40}" --out "$out/run"
megatron-fssdp report "$out/run"
