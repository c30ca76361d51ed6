"""Trains a tiny MoE model by ms-swift's own ``megatron sft`` or ``rlhf`` on CPU ranks; prints lines of JSON.

``torchrun --nproc-per-node 2 tests/hosts/swift_training.py --folder FOLDER``, with or without
``-m megatron_fssdp`` before the script. Arguments that are unknown here go to ms-swift; ``--rlhf_type`` among
them makes it ``rlhf``. The last rank prints a line for each step, with loss and gradient norm. Rank 0 prints
the norms of the exported experts last, and of their adapters.
"""

import argparse
import dataclasses
import os
import shutil
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hosts import cpu_stand_ins, tiny_qwen
from tests.hosts.cpu_stand_ins import say

# Floats of 32 bits, no fusions, no processes that load data, and nothing from a hub.
FLAGS = """
    --model_type qwen3_moe --template qwen3 --add_version false --use_hf true --check_model false
    --ddp_backend gloo --micro_batch_size 2 --global_batch_size 8 --lr 2e-2 --lr_decay_style constant
    --seed 1 --logging_steps 1 --eval_iters 0 --save_steps 1000 --no_save_optim true
    --torch_dtype float32 --fp16 false --bf16 false --attention_backend local --padding_free false
    --max_length 256 --dataset_num_proc 1 --split_dataset_ratio 0 --recompute_granularity none
    --dataloader_num_workers 0 --dataloader_pin_memory false --dataloader_persistent_workers false
    --masked_softmax_fusion false --bias_dropout_fusion false --bias_activation_fusion false
    --gradient_accumulation_fusion false --cross_entropy_loss_fusion false --use_cpu_initialization true
    --megatron_extra_kwargs {"persist_layer_norm":false} --overlap_p2p_comm false --callbacks json_lines
"""


def parsed_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the model, the data and the output")
    parser.add_argument("--attach", metavar="NAME", help="strategy for megatron_fssdp.attach")
    parser.add_argument("--settings", default="", help="its settings, as slots=2,overlap_degree=3")
    parser.add_argument("--ep", default="2", help="ranks of an expert-parallel group")
    parser.add_argument("--steps", default="8")
    return parser.parse_known_args()


def report_lines():
    """Register a callback of ms-swift that prints steps and evaluations."""
    from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map

    class JsonLines(MegatronCallback):
        def on_train_end(self):
            cpu_stand_ins.say_plans()

        def on_log(self, logs):
            cpu_stand_ins.say_plans()  # The export at the end brings moved experts home.
            if "grad_norm" in logs:
                norm = float(logs["grad_norm"])
                say(step=self.state.iteration, loss=float(logs["loss"]), gradient_norm=norm)
            else:
                say(evaluation={name: float(value) for name, value in logs.items()})

    megatron_callbacks_map["json_lines"] = JsonLines


def main():
    options, of_swift = parsed_options()
    # Rank 0 of a new folder makes its caches, too.
    os.environ.setdefault("HF_HOME", str(options.folder / "hugging_face"))
    os.environ.setdefault("MODELSCOPE_CACHE", str(options.folder / "modelscope"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cpu_stand_ins.install()
    cpu_stand_ins.attach(options.attach, options.settings)
    model, data = tiny_qwen.model_and_data(options.folder)

    import mcore_bridge.model.register

    # ms-swift's trainers of preferences import this of a package that ms-swift does not require.
    sys.modules.setdefault("msgspec", types.SimpleNamespace(field=dataclasses.field))
    from swift.megatron import megatron_rlhf_main, megatron_sft_main

    cpu_stand_ins.use_local_layers(mcore_bridge.model.register)
    report_lines()
    output = options.folder / "output"
    if os.environ["RANK"] == "0":  # Other ranks write after they have met this one.
        shutil.rmtree(output, ignore_errors=True)
    places = ["--model", str(model), "--dataset", str(data), "--output_dir", str(output)]
    sizes = ["--expert_model_parallel_size", options.ep, "--train_iters", options.steps]
    train = megatron_rlhf_main if "--rlhf_type" in of_swift else megatron_sft_main
    train([*places, *sizes, *FLAGS.split(), *of_swift])
    if os.environ["RANK"] == "0":
        from safetensors.torch import load_file

        exported = sorted(output.glob(f"checkpoint-{options.steps}*/*.safetensors"))
        weights = {name: weight for file in exported for name, weight in load_file(file).items()}
        experts = {name: weight for name, weight in weights.items() if ".experts." in name}
        say(0, experts=cpu_stand_ins.norms_of_experts(experts))


if __name__ == "__main__":
    main()
