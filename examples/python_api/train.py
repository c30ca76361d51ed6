"""Train a small GPT-MoE under ``fssdp`` without Megatron's command line or training loop.

Start it with ``torchrun --standalone --nproc-per-node 2 train.py``, on GPUs or without them. On CPUs, set
``OMP_NUM_THREADS=1``. The loop calls nothing of the plugin. ``megatron-fssdp report records`` then shows the
loads of devices with and without replicas.
"""

import argparse
import logging
import os

argparse.ArgumentParser(description=__doc__).parse_args()

logging.basicConfig(
    level=logging.INFO, format="%(message)s"
)  # shows the plugin's lines, which begin with [fssdp]

import megatron_fssdp  # noqa: E402

# Before the model is built. On a machine without a GPU, this makes Megatron run on the CPU.
attachment = megatron_fssdp.attach("fssdp", {"slots": 1, "overlap_degree": 2, "record_dir": "records"})

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

ITERATIONS, BATCH, LENGTH, VOCABULARY = 20, 4, 64, 256


def main() -> None:
    """Build the model, train it on random text, and print the loss."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)

    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=4 * ranks,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=ranks,
        add_bias_linear=False,
        use_cpu_initialization=not on_gpu,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)  # Megatron's own
    gpt = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt.cuda())
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3), [model])

    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device="cuda")
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(LENGTH, device="cuda").expand(BATCH, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
    for iteration in range(1, ITERATIONS + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens, positions, mask, labels=labels).mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        if dist.get_rank() == 0 and iteration % 5 == 0:
            print(f"iteration {iteration}: loss {loss.item():.3f}", flush=True)
    (trained,) = attachment.models
    assert trained.session is not None, "layers with a strategy"
    num_known = [len(layer.history) for layer in trained.session.runtime.layers]
    assert all(num_known), "plans come from the loads of past iterations"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
