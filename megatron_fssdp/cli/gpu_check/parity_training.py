"""Pretrains a GPT like the package's script, with plans in which transfers cost nothing.

The model of the check is small, and on such a model replicas seldom pay. With free links, every strategy
that compares costs makes replicas or moves experts wherever loads are uneven, so that their code runs. The
ranks of the check run this file under the launcher.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from megatron_fssdp.pretraining.pretrain_gpt import main
from megatron_fssdp.megatron_adapter.training import iteration_driver
from megatron_fssdp.planning.cost.cost_model import LinkCost

_FREE_S_PER_BYTE = 1e-18
_BEFORE_LAYER_S = 1.0  # compute that hides every transfer


def plan_with_free_links() -> None:
    """Replace the measured costs of links after every measurement, equally on all ranks."""
    measure = iteration_driver.profile_layers

    @wraps(measure)
    def profile_layers(layers: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        measure(layers, *args, **kwargs)
        for layer in layers:
            profile = layer.context.profile
            # Links between nodes stay slower than links inside a node, as planners expect.
            links = {"intra": LinkCost(0.0, _FREE_S_PER_BYTE), "inter": LinkCost(0.0, 2 * _FREE_S_PER_BYTE)}
            profile = replace(profile, cluster=replace(profile.cluster, **links), non_moe_s=_BEFORE_LAYER_S)
            layer.context = replace(layer.context, profile=profile)

    iteration_driver.profile_layers = profile_layers


if __name__ == "__main__":
    plan_with_free_links()
    main()
