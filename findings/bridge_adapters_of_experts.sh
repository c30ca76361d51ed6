#!/usr/bin/env bash
# Megatron-Bridge 0.6.2 exports the LoRA adapters of sequential experts incompletely, without a warning. It gathers the
# names of adapters among pipeline stages alone. So with an expert parallelism of N, each rank exports those of its own
# experts, and rank 0, which writes the files, knows 1/N of them. The experts themselves are all exported.
# Python 3.12, no GPU needed: two packages for GPUs are replaced by empty ones. Seen on 30 November 2026, 8 experts:
#   EP 1: weights of 8 experts, adapters of 8; EP 2: weights of 8 experts, adapters of 4
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install "$@"; }
pip 'megatron-core==0.19.2' 'torch==2.15.0' 'transformers==5.12.1' 'megatron-energon==7.4.1' 'nvidia-modelopt==0.47.0' \
  'multi-storage-client==1.3.1' 'peft==0.20.0' accelerate braceexpand datasets einops filetype hydra-core mfusepy ninja \
  nvidia-ml-py omegaconf psutil pulp rapidyaml requests s3fs scipy tensorboard webdataset || exit 1
pip --no-deps 'megatron-bridge==0.6.2' || exit 1

cat >"$work/export.py" <<'PY'
import importlib.machinery
import sys
import types

import torch
import torch.distributed as dist
import megatron.core.extensions.transformer_engine as engine_layers
from megatron.core import parallel_state, tensor_parallel


def add_module(name, **members):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__, module.__version__ = [], "2.20.2"
    vars(module).update(members)
    sys.modules[name] = module
    return module


# Megatron-Bridge imports two packages for GPUs, of which this uses nothing.
classes = "Linear LayerNormLinear GroupedLinear TransformerLayer RMSNorm LayerNorm".split()
classes = {name: type(name, (torch.nn.Module,), {}) for name in classes}
ops = types.SimpleNamespace(Sequential=type("Sequential", (torch.nn.Module,), {}))
attention = add_module("transformer_engine.pytorch.attention", apply_rotary_pos_emb=None, _SplitAlongDim=None)
layers = add_module("transformer_engine.pytorch", ops=ops, attention=attention, **classes)
add_module("transformer_engine", pytorch=layers)
inprocess = add_module("nvidia_resiliency_ext.inprocess", CallWrapper=object)
add_module("nvidia_resiliency_ext", inprocess=inprocess)
for name, value in list(vars(engine_layers).items()):
    if name.startswith("TE") and not isinstance(value, type):
        setattr(engine_layers, name, type(name, (torch.nn.Module,), {}))

from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft.lora import LoRA
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from transformers import Qwen3MoeConfig

torch.cuda.current_device = lambda: "cpu"
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
tensor_parallel.random.initialize_rng_tracker()
torch.manual_seed(1)
provider = GPTModelProvider(
    num_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, num_moe_experts=8, moe_router_topk=2,
    moe_ffn_hidden_size=32, moe_token_dispatcher_type="allgather", moe_grouped_gemm=False, gated_linear_unit=True,
    activation_func=torch.nn.functional.silu, normalization="RMSNorm", add_bias_linear=False,
    position_embedding_type="rope", seq_length=32, vocab_size=128, share_embeddings_and_output_weights=False,
    expert_model_parallel_size=dist.get_world_size(), transformer_impl="local", use_cpu_initialization=True,
    gradient_accumulation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
    masked_softmax_fusion=False, cross_entropy_loss_fusion=False, persist_layer_norm=False,
    transformer_layer_spec=lambda config, vp_stage=None: get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    ),
)
provider.finalize()
model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
model = LoRA(dim=4, alpha=8, target_modules=["linear_fc1", "linear_fc2"])(model, training=True)
config = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"], num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=32, vocab_size=128, hidden_size=32, num_hidden_layers=1,
)
bridge = AutoBridge.from_hf_config(config)
how = {"cpu": True, "show_progress": False}
adapters = [name for name, _ in bridge.export_adapter_weights(model, **how)]
weights = [name for name, _ in bridge.export_hf_weights(model, merge_adapter_weights=False, **how)]


def count(names):
    return len({name.split(".experts.")[1].split(".")[0] for name in names if ".experts." in name})


if dist.get_rank() == 0:
    print(f"weights of {count(weights)} experts, adapters of {count(adapters)}")
PY
export_under() {
  (cd "$work" && OMP_NUM_THREADS=1 venv/bin/python -W ignore -m torch.distributed.run --standalone \
    --nproc-per-node "$1" export.py 2>"errors$1.txt" | grep '^weights')
}
seen="EP 1: $(export_under 1); EP 2: $(export_under 2)"
echo "megatron-bridge 0.6.2: $seen"
wanted="EP 1: weights of 8 experts, adapters of 8; EP 2: weights of 8 experts, adapters of 4"
[ "$seen" = "$wanted" ] || { tail -n 30 "$work"/errors*.txt | grep 'rank0'; echo "changed: expected '$wanted'"; exit 1; }
