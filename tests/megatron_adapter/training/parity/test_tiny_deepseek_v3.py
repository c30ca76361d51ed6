"""The shipped small DeepSeek-V3 trains under a strategy, with the losses of stock Megatron.

It has what no other default training has: multi-latent attention, multi-token prediction, groups of experts
with sigmoid scores and biases, a shared expert and dense layers in one model. The script is that of this
package.
"""

import shlex

from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.megatron_arguments import Installation, megatron_arguments
from megatron_fssdp.launch.run_data import data_arguments

from ...fused_dispatch import install_fused_dispatch
from ...training_run import SCRIPT, Model, assert_close, train

FILES = ("models/tiny-deepseek-v3", "parallelism/cpu", "training/tiny", "strategies/fssdp")
OVERRIDES = """
    model.seq_length=16 parallelism.nproc_per_node=2 parallelism.declared_nodes=1
    parallelism.expert_model_parallel_size=2 training.train_iters=2
    training.micro_batch_size=2 training.global_batch_size=8
    training.lr_warmup_iters=0 training.save_checkpoints=false training.tensorboard=false
"""
BYTES = 257


def test_losses_equal_those_of_stock_megatron(text_data, tmp_path):
    stock = _train(text_data, tmp_path, "strategy={name: none}")
    ours = _train(
        text_data,
        tmp_path,
        "strategy={name: fssdp, settings: {slots: 2, overlap_degree: 3, reshard_interval: 1}}",
        # The kernels of this dispatcher are stand-ins.
        *("model.moe_token_dispatcher_type=flex", "model.moe_flex_dispatcher_backend=deepep"),
    )
    assert any("re-sharded" in message for message in ours.messages)
    assert_close(ours, stock)
    assert stock.losses[-1] < stock.losses[0]


def _train(data, folder, *overrides):
    run = load_run(FILES, [*OVERRIDES.split(), *overrides])
    tokens = data_arguments(run, folder, BYTES, BYTES - 1, 50) | {"data_path": data}
    words = megatron_arguments(run, tokens, Installation(True, False), folder, resume=False)
    return train(2, "", data, model=Model(SCRIPT, shlex.join(words)), before=install_fused_dispatch)
