"""Compares Pro-Prophet's Eq. 1 to 5 with the simulator, operation by operation (the counterpart of Fig. 13).

The simulator takes the place of the paper's measurements: it knows start-ups, both kinds of links, and that a
transfer crosses a node's link only once, where the equations have one mean bandwidth. Experts are sent to all
devices (n = 0), and operations run one after the other.

Shape letters: I iterations, L layers, D devices, E experts.
"""

from functools import cache
from typing import Literal

import numpy as np

from benchmarks.papers.setting import PROFILED, Setting
from megatron_fssdp.config.strategy.strategy_registry import strategy_settings
from megatron_fssdp.simulation.simulator import simulate
from megatron_fssdp.strategies.layer_plan import LayerPlan
from megatron_fssdp.strategies.prophet.prophet_strategy import ProphetModel

OPERATIONS = {"A2A": "dispatch", "EC": "experts", "Trans": "spAG", "Agg": "spRS"}
"""Operations of Fig. 13, and how the simulator's timeline names them."""


Bandwidth = Literal["a device's share", "a node's link"]
"""Meanings of the mean bandwidth, which the paper does not define. Both are about links between nodes."""


def model_of(setting: Setting, bandwidth: Bandwidth) -> ProphetModel:
    """Return the equations' constants."""
    job, cluster = setting.job, setting.description
    num_sharing = cluster.devices_per_node if bandwidth == "a device's share" else 1
    return ProphetModel(
        num_devices=job.num_devices,
        input_bytes=job.token_bytes,
        expert_bytes=job.expert_bytes,
        gradient_bytes=job.expert_bytes,
        bytes_per_s=cluster.inter_node.bandwidth_bytes_per_s / num_sharing,
        inputs_per_s=cluster.expert_flops_per_s / job.expert_flops_per_token,
    )


@cache
def compared(setting: Setting, bandwidth: Bandwidth) -> dict[str, np.ndarray]:
    """Return modelled and simulated seconds of each operation: float64 ``[layers of iterations, 2]``.

    Iterations in which costs are measured, and operations that do not happen, are left out.
    """
    plans: dict[tuple[int, int], LayerPlan] = {}
    outcome = simulate(
        "prophet",
        strategy_settings("prophet", {"left_out": 0, "overlap": False}, "prophet"),
        setting.counts_ILDE,
        setting.description,
        setting.job,
        on_plan=lambda iteration, layer, plan: plans.__setitem__((iteration, layer), plan),
    )
    model = model_of(setting, bandwidth)
    samples: dict[str, list[tuple[float, float]]] = {operation: [] for operation in OPERATIONS}
    for iteration in range(PROFILED, setting.num_iterations):
        spans = outcome.spans(iteration)
        seconds = {name: end_s - begin_s for _, name, begin_s, end_s in spans}
        for layer in range(setting.job.num_layers):
            plan = plans[iteration, layer]
            modelled = _modelled(model, plan, setting.counts_ILDE[iteration, layer])
            for operation, name in OPERATIONS.items():
                simulated_s = seconds.get(f"{name} layer {layer + 1}", 0.0)
                if simulated_s > 0:
                    samples[operation].append((modelled[operation], simulated_s))
    return {operation: np.array(pairs).reshape(-1, 2) for operation, pairs in samples.items()}


def _modelled(model: ProphetModel, plan: LayerPlan, counts_DE: np.ndarray) -> dict[str, float]:
    placement = plan.placement
    present_DE, owner_E = placement.present_ED.T, placement.owner_E
    local_D = np.where(present_DE, counts_DE, 0).sum(axis=1)
    sent_E = np.where(present_DE, 0, counts_DE).sum(axis=0)
    received_D = np.bincount(owner_E, weights=sent_E, minlength=model.num_devices)
    num_selected = int((present_DE.sum(axis=0) > 1).sum())
    return {
        "A2A": float(model.all_to_all_s(received_D.max())),
        "EC": float(model.expert_s((local_D + received_D).max())),
        "Trans": float(model.transfer_s(num_selected, model.expert_bytes, 0)),
        "Agg": float(model.transfer_s(num_selected, model.gradient_bytes, 0)),
    }


def mean_difference(operation: str, setting: Setting, bandwidth: Bandwidth) -> float:
    """Return the mean relative difference of an operation's modelled and simulated seconds."""
    modelled_s, simulated_s = compared(setting, bandwidth)[operation].T
    return float(np.abs(modelled_s / simulated_s - 1).mean())
