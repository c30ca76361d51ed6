"""Trains a tiny MoE model by verl's workers, two actors of Ray on CPU ranks; prints lines of JSON.

``python tests/hosts/verl_under_ray.py FOLDER``, with the model's folder. The actors have this program's
environment. Steps and lines are those of ``verl_training.py``.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import ray
import torch
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from tests.hosts import cpu_stand_ins, verl_training
from tests.hosts.cpu_stand_ins import say

RANKS, STEPS = 2, 3
BATCH = RANKS * verl_training.MINI_BATCH
ORDER = {"epochs": verl_training.EPOCHS, "seed": 42, "dataloader_kwargs": {"shuffle": False}}


class CpuWorker(TrainingWorker):
    """verl's worker over gloo."""

    def __init__(self, config):
        cpu_stand_ins.install()
        verl_training.use_gloo()
        super().__init__(config)


def experts_of(worker):
    cpu_stand_ins.say_plans()  # into the log of the actor, which Ray prints in the driver
    weights = {name: weight.clone() for name, weight in worker.engine.get_per_tensor_param()[0]}
    return cpu_stand_ins.norms_of_experts(weights)


def packed(samples, **facts):
    data = left_right_2_no_padding(tensordict_utils.get_tensordict(dict(samples)))
    tensordict_utils.assign_non_tensor(data, temperature=1.0, **facts)
    return data


def train(workers, step):
    of_ranks = [verl_training.answers(step, rank) for rank in range(RANKS)]
    samples = {name: torch.cat([of_rank[name] for of_rank in of_ranks]) for name in of_ranks[0]}
    data = packed(samples, compute_loss=False)
    output = workers.infer_batch(data).get()
    samples["old_log_probs"] = no_padding_2_padding(output["log_probs"], data)
    data = packed(samples, global_batch_size=BATCH, mini_batch_size=BATCH, **ORDER)
    metrics = tensordict_utils.get(workers.train_mini_batch(data).get(), "metrics")
    for loss, norm in zip(metrics["loss"], metrics["grad_norm"], strict=True):
        say(loss=loss, gradient_norm=norm)


def main():
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}  # for the lines of JSON
    options = verl_training.parsed_options(["--folder", sys.argv[1]])
    ray.init(num_cpus=2 * RANKS, include_dashboard=False)
    configuration = verl_training.configuration_of(options, "actor")
    workers = RayWorkerGroup(
        RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1),
        RayClassWithInitArgs(ray.remote(CpuWorker), config=configuration),
        device_name="cpu",
    )
    workers.set_loss_fn(verl_training.policy_loss())
    workers.reset()
    for step in range(STEPS):
        train(workers, step)
    experts, *_ = ray.get([worker.__ray_call__.remote(experts_of) for worker in workers.workers])
    say(experts=experts)


if __name__ == "__main__":
    main()
