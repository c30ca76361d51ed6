"""Says in which layers of a model a strategy is, before its first iteration."""

import logging

from megatron.core.utils import log_single_rank

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.all_ranks import of_all_ranks
from megatron_fssdp.megatron_adapter.iterations.host_model import HostModel
from megatron_fssdp.planning.compiled_form import kernel_form

logger = logging.getLogger(__name__)


def report_installation(model: HostModel) -> None:
    """Log one line about the layers of a model that have joined, on global rank 0. Collective."""
    session = model.session
    assert session is not None
    layers = session.runtime.layers
    if not sum(of_all_ranks(len(layers))):
        raise ConfigurationError(
            f"--moe-strategy {model.name}: got a model with experts and no MoE layer on any rank, wanted "
            "Megatron's MoE layers; build the model from Megatron's MoE specs, or use --moe-strategy none"
        )
    place, limits = "the MoE layers of other pipeline stages; this stage has no MoE layer", ""
    if layers:
        context = layers[0].context
        numbers = ", ".join(str(layer.context.layer) for layer in layers)
        place = (
            f"{len(layers)} MoE layers of this pipeline stage (layers {numbers}), {context.num_experts} "
            f"experts on {context.num_devices} devices in {context.topology.num_nodes} node(s)"
        )
        measured = session.strategy.profile_iterations
        limits = f"{session.strategy.limits(context)}; "
        if measured:
            limits = f"costs are measured in the first {measured} iterations; "
        if model.name == "parm" and model.host.tensor_model_parallel_size == 1:
            limits = f"without tensor parallelism, {model.name} is the same as ep; "
    settings = model.settings.model_dump(exclude_defaults=True, mode="json")
    shown = " ".join(f"{key}={value}" for key, value in settings.items()) or "all by default"
    if session.keeps_owners:
        limits += f"owners do not move, because {session.keeps_owners}; "
    log_single_rank(
        logger,
        logging.INFO,
        f"[fssdp] strategy {model.name}: installed in {place}; settings: {shown}; {limits}"
        f"planning kernels: {kernel_form()}",
    )
