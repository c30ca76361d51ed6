"""Trains a tiny MoE model by verl's own workers with Megatron engines on CPU ranks; prints lines of JSON.

``torchrun --nproc-per-node 2 tests/hosts/verl_training.py --folder FOLDER``. Steps are those of PPO: the
actor's log-probabilities, then two epochs of two mini-batches, then weights for the rollout. The last rank
prints a line for each mini-batch, with loss and gradient norm, and one for each forward-only pass. Rank 0
prints the norms of the exported weights last.
"""

import argparse
import functools
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from tests.hosts import cpu_stand_ins, tiny_qwen
from tests.hosts.cpu_stand_ins import say

SAMPLES, MINI_BATCH, EPOCHS, WIDTH, TOKENS = 8, 4, 2, 12, 64  # of a rank; tokens of a micro-batch
NUMBERS = {"pp": 1, "ep": 2, "steps": 3, "first-step": 0}
FLAGS = {
    "critic": "a second model that trains",
    "reference": "a model that never trains",
    "replay": "the actor's routes when it trains",
    "offload": "weights and optimizer states between the phases",
    "fully-reshardable": "checkpoints",
    "lora": "the actor trains adapters only",
    "recompute": "",
}
ADAPTERS = {"type": "lora", "rank": 4, "alpha": 8, "dropout": 0.0, "merge": True}
FUSIONS = """
    gradient_accumulation_fusion bias_dropout_fusion bias_activation_fusion masked_softmax_fusion
    apply_rope_fusion cross_entropy_loss_fusion moe_permute_fusion persist_layer_norm
"""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def parsed_options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the model")
    parser.add_argument("--attach", metavar="NAME", help="strategy for megatron_fssdp.attach")
    parser.add_argument("--settings", default="", help="its settings, as slots=2,overlap_degree=3")
    parser.add_argument("--external-lib", type=Path, metavar="FILE", help="which verl imports")
    for name in ("save", "load"):
        parser.add_argument(f"--{name}", metavar="PATH")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    for name, meaning in FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=meaning)
    return parser.parse_args(arguments)


def use_gloo():
    """Begin process groups of CPU ranks, whose reductions know averages, and let verl ask for memory."""
    torch.cuda.mem_get_info = lambda *_: (0, 0)
    dist.init_process_group("gloo")
    all_reduce = dist.all_reduce

    def averaging(tensor, op=dist.ReduceOp.SUM, group=None, **rest):
        if op != dist.ReduceOp.AVG:
            return all_reduce(tensor, op=op, group=group, **rest)
        all_reduce(tensor, group=group)
        return tensor.div_(dist.get_world_size(group))

    dist.all_reduce = averaging


class PackedAttention(torch.nn.Module):
    """Causal attention inside of packed sequences, in place of Transformer Engine's."""

    def __init__(self, **_):
        super().__init__()

    def forward(self, query, key, value, *_, packed_seq_params, **__):
        ends, results = packed_seq_params.cu_seqlens_q.tolist(), []
        for begin, end in itertools.pairwise(ends):
            heads = (part[begin:end].transpose(0, 1) for part in (query, key, value))
            output = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            results.append(output.transpose(0, 1).flatten(1))
        return torch.cat(results)


def local_layers(config, vp_stage=None):
    from megatron.core.models.gpt import gpt_layer_specs

    if not hasattr(gpt_layer_specs.get_gpt_decoder_block_spec, "__wrapped__"):
        cpu_stand_ins.use_local_layers(gpt_layer_specs)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return block


def configuration_of(options, kind):
    """What verl's worker of the actor, the critic or the reference is made from."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreOptimizerConfig, TrainingWorkerConfig

    folder, _ = tiny_qwen.model_and_data(options.folder)
    if (library := options.external_lib) is not None:
        sys.path.insert(0, str(library.parent))
    adapters = ADAPTERS if options.lora and kind == "actor" else {}
    schedule = {"lr_warmup_steps": 0, "total_training_steps": 100, "lr_decay_style": "constant"}
    return TrainingWorkerConfig(
        model_type="value_model" if kind == "critic" else "language_model",
        model_config=HFModelConfig(path=str(folder), external_lib=library and library.stem, lora=adapters),
        engine_config=engine_of(options, kind),
        optimizer_config=McoreOptimizerConfig(lr=5e-3, clip_grad=1.0, **schedule),
        checkpoint_config=CheckpointConfig(),
    )


def worker_of(options, kind):
    from verl.workers.engine_workers import TrainingWorker

    worker = TrainingWorker(configuration_of(options, kind))
    worker.reset()
    worker.set_loss_fn(value_loss() if kind == "critic" else policy_loss())
    return worker


def engine_of(options, kind):
    from verl.workers.config import McoreEngineConfig
    from verl.workers.config.engine import EngineRouterReplayConfig

    changes = {"transformer_layer_spec": local_layers, **dict.fromkeys(FUSIONS.split(), False)}
    engine = McoreEngineConfig(
        pipeline_model_parallel_size=options.pp,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=1,
        param_offload=options.offload,
        optimizer_offload=options.offload,
        forward_only=kind == "reference",
        override_transformer_config=changes | (RECOMPUTE if options.recompute else {}),
        override_ddp_config={"gradient_reduce_div_fusion": False},  # gloo has no reduction that multiplies.
        max_token_len_per_gpu=TOKENS,
        infer_max_token_len_per_gpu=2 * TOKENS,
        dist_ckpt_optim_fully_reshardable=options.fully_reshardable,
        router_replay=EngineRouterReplayConfig(mode="R2" if options.replay else "disabled"),
    )
    object.__setattr__(engine, "dtype", "float32")  # verl's check knows 16 bits only.
    return engine


def policy_loss():
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = ActorConfig(strategy="megatron", rollout_n=1, use_dynamic_bsz=True)
    return functools.partial(ppo_loss, config=config)


def value_loss():
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    return functools.partial(value_loss, config=CriticConfig(strategy="megatron", use_dynamic_bsz=True))


def answers(step, replica):
    """Prompts and responses of several lengths, padded at the left and at the right, with advantages."""
    drawn = torch.Generator().manual_seed(1000 * step + replica)
    prompt, response = torch.randint(3, WIDTH + 1, (2, SAMPLES, 1), generator=drawn)
    places = torch.arange(WIDTH)
    mask = torch.cat([places >= WIDTH - prompt, places < response], 1)
    tokens = torch.randint(0, 60, (SAMPLES, 2 * WIDTH), generator=drawn) * mask
    advantages, returns = torch.rand(2, SAMPLES, WIDTH, generator=drawn) + 0.5
    return {
        "input_ids": tokens,
        "prompts": tokens[:, :WIDTH],
        "responses": tokens[:, WIDTH:],
        "attention_mask": mask.long(),
        "response_mask": mask[:, WIDTH:].long(),
        "position_ids": (mask.long().cumsum(1) - 1).clamp_(min=0),
        "advantages": advantages,
        "returns": returns,
    }


class Phases:
    """What verl's trainer asks its workers to do with samples."""

    def __init__(self, options):
        self.options = options
        kinds = [kind for kind in ("reference", "critic") if getattr(options, kind)]
        self.workers = {kind: worker_of(options, kind) for kind in (*kinds, "actor")}
        engine = self.workers["actor"].engine
        self.replica, self.num_replicas = engine.get_data_parallel_rank(), engine.get_data_parallel_size()

    def _data(self, samples, kind, **facts):
        from verl.utils import tensordict_utils
        from verl.workers.utils.padding import left_right_2_no_padding

        packed = left_right_2_no_padding(tensordict_utils.get_tensordict(dict(samples)))
        if self.options.replay and kind == "actor":
            facts["enable_routing_replay"] = True
        tensordict_utils.assign_non_tensor(packed, temperature=1.0, **facts)
        return packed

    def infer(self, kind, key, samples):
        """Return log-probabilities or values of the samples, which the driver gives to all stages."""
        from verl.workers.utils.padding import no_padding_2_padding

        packed = self._data(samples, kind, compute_loss=False)
        output = self.workers[kind].infer_batch(packed)
        mine = None
        if output is not None:
            mine = self.replica, no_padding_2_padding(output[key], packed), output.get("routed_experts", None)
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        _, result, routes = next(part for part in of_ranks if part is not None and part[0] == self.replica)
        if routes is not None:
            samples["routed_experts"] = routes
        say(evaluation={kind: result.double().norm().item()})
        return result

    def train(self, kind, samples):
        from verl.utils import tensordict_utils

        batch = MINI_BATCH * self.num_replicas
        order = {"epochs": EPOCHS, "seed": 42, "dataloader_kwargs": {"shuffle": False}}
        packed = self._data(samples, kind, global_batch_size=batch, mini_batch_size=batch, **order)
        if (output := self.workers[kind].train_mini_batch(packed)) is None:
            return
        metrics = tensordict_utils.get(output, "metrics")
        for loss, norm in zip(metrics["loss"], metrics["grad_norm"], strict=True):
            say(kind=kind, loss=loss, gradient_norm=norm)


def main():
    options = parsed_options()
    cpu_stand_ins.install()
    use_gloo()
    cpu_stand_ins.attach(options.attach, options.settings)
    phases = Phases(options)
    actor = phases.workers["actor"]
    if options.load:
        actor.load_checkpoint(options.load)
    weights = {}
    steps = range(options.first_step, options.first_step + options.steps)
    for step in steps:
        samples = answers(step, phases.replica)
        samples["old_log_probs"] = phases.infer("actor", "log_probs", samples)
        if options.reference:
            phases.infer("reference", "log_probs", samples)
        if options.critic:
            samples["values"] = phases.infer("critic", "values", samples)
            phases.train("critic", samples)
        phases.train("actor", samples)
        if options.save and step == steps[-1]:  # before weights are read
            actor.save_checkpoint(options.save, global_step=step + 1)
        weights = {name: weight.clone() for name, weight in actor.engine.get_per_tensor_param()[0]}
        if options.offload:
            actor.to("cpu")
    cpu_stand_ins.say_plans()
    say(0, experts=cpu_stand_ins.norms_of_experts(weights))


if __name__ == "__main__":
    main()
