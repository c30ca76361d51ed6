#!/usr/bin/env bash
# A new user's first ten minutes, on CPU ranks in an empty folder, with nothing but the wheel: quickstart, own text, own
# Megatron checkout, report, simulate, resume and compare. usage: bash scripts/first_ten_minutes.sh WHEEL [MEGATRON_LM]
#   MEGATRON_LM    a checkout of Megatron-LM. A copy of it is patched. Without it, this part is left out.
#   DEPENDENCIES=  a site-packages folder that has all dependencies, for a machine without a package index
#   ITERS=         iterations of the quickstart's runs (default 20)
# exit: 0 everything worked; otherwise the last step that was printed failed
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

wheel="$(realpath "${1:?usage: bash scripts/first_ten_minutes.sh WHEEL [MEGATRON_LM]}")"
megatron="${2:+$(realpath "$2")}"
iters="${ITERS:-20}"
python="$(find_python)"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export MEGATRON_FSSDP_DEVICE=cpu OMP_NUM_THREADS=1
cd "$folder"

step() { echo "== $((SECONDS / 60)):$(printf %02d $((SECONDS % 60))) $1"; }
fail() { echo "$1" >&2 && exit 1; }

step "install (without DEPENDENCIES, pip downloads torch and its CUDA libraries: several GB)"
"$python" -m venv venv
if [[ -n "${DEPENDENCIES:-}" ]]; then
  venv/bin/pip install --quiet --disable-pip-version-check --no-deps "$wheel"
  printf '#!/usr/bin/env bash\nexec python -m torch.distributed.run "$@"\n' >venv/bin/torchrun
  chmod +x venv/bin/torchrun
  echo "$DEPENDENCIES" >"$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/dependencies.pth"
else
  venv/bin/pip install --quiet --disable-pip-version-check "${wheel}[tools]"
fi
export PATH="$folder/venv/bin:$PATH"
megatron-fssdp --version

step "own text: one JSON object per line"
for number in {1..300}; do
  echo "{\"text\": \"Document $number says that $number and $number make $((2 * number)).\"}"
done >text.jsonl
megatron-fssdp data build text.jsonl --vocab-size 512 --out data

step "quickstart: the same run under ep and under fssdp"
train=(megatron-fssdp train gpt_moe_tiny --set data.path=data --set training.save_interval=2)
"${train[@]}" --moe-strategy ep --iters "$iters" --out runs/ep
"${train[@]}" --moe-strategy fssdp --iters "$iters" --out runs/fssdp

step "report and compare"
megatron-fssdp report runs/fssdp
megatron-fssdp compare runs/ep runs/fssdp
[[ -f runs/fssdp/report.html && -f runs/ep/comparison.html ]] || fail "a page is missing"

step "resume with more iterations; all other options are kept"
megatron-fssdp train gpt_moe_tiny --out runs/fssdp --resume --iters "$((iters + 2))"
(($(wc -l <runs/fssdp/metrics.jsonl) == iters + 2)) || fail "runs/fssdp does not have $((iters + 2)) iterations"

step "simulate, on the loads and the settings of a run"
megatron-fssdp simulate --loads runs/fssdp --cluster hpwnv --cluster-set num_nodes=1 --out what-if

step "the printed command"
bash -ec "$("${train[@]}" --iters 2 --out runs/printed --dry-run)" >printed.log 2>&1 || fail "$(tail -n 20 printed.log)"

if [[ -n "$megatron" ]]; then
  step "own Megatron-LM, patched: no YAML, no megatron-fssdp train"
  cp -r "$megatron" Megatron-LM
  bash "$ROOT/scripts/apply_patches.sh" Megatron-LM
  torchrun --standalone --nproc-per-node 2 Megatron-LM/pretrain_gpt.py \
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16 \
    --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-3 \
    --lr-decay-style constant --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type none \
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --mock-data --tokenizer-type NullTokenizer \
    --vocab-size 257 --split 100,0,0 --num-workers 0 --eval-iters 0 --eval-interval 1000 \
    --distributed-backend gloo --use-cpu-initialization \
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm \
    --no-rope-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --disable-jit-fuser \
    --moe-strategy fssdp --moe-strategy-set record_dir=runs/own >own.log 2>&1 || fail "$(tail -n 20 own.log)"
  megatron-fssdp report runs/own
  two=(--cluster hpwnv --cluster-set num_nodes=1 --cluster-set devices_per_node=2)
  megatron-fssdp simulate --loads runs/own "${two[@]}" --out what-if-own
fi

step "done"
