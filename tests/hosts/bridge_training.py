"""Trains a tiny MoE model by Megatron-Bridge's own ``pretrain()`` on CPU ranks; prints lines of JSON.

``torchrun --nproc-per-node 2 tests/hosts/bridge_training.py --ep 2``, with or without ``-m megatron_fssdp``
before the script. The last rank prints a line for each step, with loss and gradient norm, and one for each
evaluation. Rank 0 prints the norms of the experts' weights last, under their Hugging Face names.
"""

import argparse
import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.hosts import cpu_stand_ins
from tests.hosts.cpu_stand_ins import say

NUMBERS = {"tp": 1, "pp": 1, "ep": 2, "layers": 2, "steps": 8, "micro-batches": 2, "save-every": 4}
FILES = {
    "pretrained": "of a run with --save",
    "save": "",
    "load": "",
    "export": "experts in Hugging Face format",
}
FLAGS = {
    "host": "give attach() the configuration",
    "model-config": "instead of a provider",
    "sgd": "weights then show how large gradients are",
    "overlap": "reduction of gradients, gather of parameters",
    **dict.fromkeys(("grouped", "distributed-optimizer", "fsdp", "bf16", "recompute"), ""),
}


def parsed_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--attach", metavar="NAME", help="strategy for megatron_fssdp.attach")
    parser.add_argument("--settings", default="", help="its settings, as slots=2,overlap_degree=3")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument("--evaluate-every", type=int, metavar="STEPS")
    parser.add_argument("--lora", metavar="ADAPTERS", help="needs --pretrained")
    for name, meaning in FILES.items():
        parser.add_argument(f"--{name}", metavar="PATH", help=meaning)
    for name, meaning in FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=meaning)
    # The plugin's own arguments remain in sys.argv.
    return parser.parse_known_args()[0]


def bridge_of(num_layers):
    """Megatron-Bridge's AutoBridge."""
    from megatron.bridge import AutoBridge

    from tests.hosts import bridge_configuration, tiny_qwen

    names = {"architectures": ["Qwen3MoeForCausalLM"]}
    of_model = tiny_qwen.config_of(num_layers, bridge_configuration.VOCABULARY, tiny_qwen.HEADS, **names)
    return AutoBridge.from_hf_config(of_model)


def exported_experts(model, bridge, tasks=None):
    """The experts' weights as it exports them, perhaps by tasks that were kept; all ranks call this."""
    how = {"cpu": True, "show_progress": False}
    if tasks is None:
        exported = [*bridge.export_adapter_weights(model, **how), *bridge.export_hf_weights(model, **how)]
    else:
        how |= {"quantization_checker": lambda name: False, "quant_fn": None, "conversion_tasks": tasks}
        exported = bridge.export_hf_weights_quant(model, **how)
    return {name: weight.clone() for name, weight in exported if ".experts." in name}


def main():
    options = parsed_options()
    if options.fsdp:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # Megatron-FSDP refuses 1.
    cpu_stand_ins.install()
    cpu_stand_ins.make_loads_uneven()
    if options.grouped:
        cpu_stand_ins.use_grouped_experts()
    if not options.host:
        cpu_stand_ins.attach(options.attach, options.settings)

    from megatron.bridge.training import setup
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from tests.hosts.bridge_configuration import configuration_of

    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)

    bridge = bridge_of(options.layers)

    class Lines(Callback):
        def on_train_start(self, context):
            self.tasks = bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, context.model)

        def on_train_step_end(self, context):
            losses = {name: loss.item() for name, loss in (context.loss_dict or {}).items()}
            step = context.state.train_state.step + 1
            say(step=step, loss=losses.get("lm loss"), gradient_norm=float(context.grad_norm))
            if step == 6 and not options.lora:  # Experts may have moved since the tasks were made.
                experts = exported_experts(context.model, bridge, self.tasks)
                say(0, experts=cpu_stand_ins.norms_of_experts(experts))

        def on_eval_end(self, context):
            say(evaluation={name: float(loss) for name, loss in (context.total_loss_dict or {}).items()})

        def on_train_end(self, context):
            cpu_stand_ins.say_plans()
            experts = exported_experts(context.model, bridge)
            say(0, experts=cpu_stand_ins.norms_of_experts(experts))
            if options.export and os.environ["RANK"] == "0":
                torch.save(experts, options.export)

    configuration = configuration_of(options)
    if options.host:
        cpu_stand_ins.attach(options.attach, options.settings, configuration)
    pretrain(configuration, forward_step, callbacks=[Lines()])


if __name__ == "__main__":
    main()
