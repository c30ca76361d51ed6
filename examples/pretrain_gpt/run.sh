#!/usr/bin/env bash
# Trains a Mixtral-like model of 8 experts with an unmodified pretrain_gpt.py on all GPUs of this node, on mock data.
# usage: bash run.sh MEGATRON_CHECKOUT [STRATEGY]
# This script was checked on CPUs only as far as its arguments go; it was never run on a GPU.
set -euo pipefail
megatron="${1:?usage: bash run.sh MEGATRON_CHECKOUT [STRATEGY]}"
strategy="${2:-fssdp}"
gpus="$(nvidia-smi --list-gpus | wc -l)"

export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_LAUNCH_ORDER_IMPLICIT=1
torchrun --standalone --nproc-per-node="$gpus" -m megatron_fssdp "$megatron/pretrain_gpt.py" \
  --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5632 --swiglu --disable-bias-linear \
  --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights \
  --seq-length 4096 --max-position-embeddings 4096 --bf16 \
  --num-experts "$((gpus * 2))" --moe-router-topk 2 --moe-router-load-balancing-type none \
  --moe-token-dispatcher-type alltoall --expert-model-parallel-size "$gpus" \
  --micro-batch-size 1 --global-batch-size "$((gpus * 4))" --train-iters 200 --lr 1e-4 --lr-decay-style constant \
  --use-distributed-optimizer --overlap-grad-reduce --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 \
  --split 100,0,0 --eval-iters 0 --eval-interval 1000 --log-interval 10 \
  --moe-strategy "$strategy" --moe-strategy-set "record_dir=runs/$strategy"
megatron-fssdp report "runs/$strategy"
