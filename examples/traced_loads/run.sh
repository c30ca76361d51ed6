#!/usr/bin/env bash
# Traces the routers of a stock Megatron-LM run, and simulates what strategies would do with its loads.
# The traced run has no plugin in it: on GPUs, torchrun starts Megatron's own script. Without a GPU, stock Megatron
# cannot run, so the launcher lends it its CPU runtime, and no strategy.
# usage: bash run.sh MEGATRON_CHECKOUT [FOLDER]    a checkout of main, July 2026 or later
set -euo pipefail
megatron="${1:?usage: bash run.sh MEGATRON_CHECKOUT [FOLDER]}"
out="${2:-traced}"
here="$(dirname "${BASH_SOURCE[0]}")"
launcher=()
backend=(--bf16)
if ! nvidia-smi >/dev/null 2>&1; then
  export MEGATRON_FSSDP_DEVICE=cpu OMP_NUM_THREADS=1
  launcher=(-m megatron_fssdp)
  backend=(--distributed-backend gloo --use-cpu-initialization --transformer-impl local --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-rope-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --disable-jit-fuser)
fi

CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONPATH="$megatron${PYTHONPATH:+:$PYTHONPATH}" torchrun --standalone --nproc-per-node=4 \
  "${launcher[@]}" "$megatron/pretrain_gpt.py" "${backend[@]}" \
  --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 \
  --max-position-embeddings 64 --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type none \
  --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 16 \
  --train-iters 12 --lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 257 \
  --split 100,0,0 --num-workers 0 --eval-iters 0 --eval-interval 1000 --log-interval 4 \
  --moe-routing-trace-path "$out/traces"

megatron-fssdp report "$out/traces" --model "$here/model.yaml" --out "$out/report.html"
megatron-fssdp simulate --loads "$out/traces" --model "$here/model.yaml" --cluster h200 --cluster-set num_nodes=1 \
  --cluster-set devices_per_node=4 --strategies ep,fssdp,prophet --out "$out/simulation"
