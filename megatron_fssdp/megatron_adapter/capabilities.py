"""Whether the installed Megatron has the seams that the plugin hangs on.

Detected by symbol, not by version string: a fork or a nightly build with the seams
works, a release without them is refused before anything runs.
"""

import importlib
import importlib.metadata
import inspect
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError

TESTED_RANGE = "megatron-core>=0.19,<0.21"
"""The releases that are tested, said here once: messages use it, tests hold pyproject.toml, constraints.txt
and README.md to it."""

# module, attribute path, what the plugin does with it
_SEAMS = (
    ("megatron.core.models.gpt.moe_module_specs", "MoELayer", "puts its layer into Megatron's own specs"),
    ("megatron.core.models.gpt.moe_module_specs", "get_moe_module_spec", "builds layer specs"),
    ("megatron.core.transformer.moe.moe_layer", "MoELayer.route", "plans before the gate"),
    ("megatron.core.transformer.moe.moe_layer", "MoELayer.routed_experts_compute", "runs the experts"),
    ("megatron.core.transformer.moe.token_dispatcher", "MoETokenDispatcher", "dispatches tokens"),
    (
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.start_grad_sync",
        "orders the expert gradients' reduction",
    ),
    (
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.finish_grad_sync",
        "orders the expert gradients' reduction",
    ),
    (
        "megatron.core.distributed",
        "DistributedDataParallel._make_forward_pre_hook",
        "has experts' parameters gathered before they are used",
    ),
    (
        "megatron.core.transformer.transformer_block",
        "TransformerBlock.sharded_state_dict",
        "names experts in checkpoints by their owners",
    ),
)

_TRAINING_SEAMS = (
    ("megatron.training.arguments", "add_megatron_arguments", "adds its arguments"),
    ("megatron.training.arguments", "parse_args", "adds its arguments"),
    ("megatron.training.arguments", "validate_args", "checks its arguments"),
    ("megatron.training.training", "setup_model_and_optimizer", "checks the built model"),
    ("megatron.training.training", "train", "says where a run stopped"),
    ("megatron.training.training", "train_step", "marks iterations"),
    ("megatron.training.training", "get_forward_backward_func", "notices that an iteration is repeated"),
    (
        "megatron.core.transformer.transformer_layer",
        "TransformerLayer.mlp",
        "starts to gather experts under the attention",
    ),
    (
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.finish_param_sync",
        "completes parameters before experts move",
    ),
    (
        "megatron.core.distributed",
        "DistributedDataParallel.expert_parallel_bucket_groups",
        "completes parameters before experts move",
    ),
    (
        "megatron.core.distributed",
        "DistributedDataParallel.remove_forward_pre_hook_handles",
        "completes parameters before experts move",
    ),
    (
        "megatron.core.distributed",
        "DistributedDataParallel.overlap_param_gather_with_optimizer_step",
        "completes parameters before experts move",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._get_model_param_range_map",
        "moves optimizer states between devices",
    ),
    ("megatron.training.checkpointing", "generate_state_dict", "saves the owner map"),
    (
        "megatron.training.checkpointing",
        "dist_checkpointing.load_content_metadata",
        "takes the owner map up again",
    ),
    (
        "megatron.training.checkpointing",
        "dist_checkpointing.save",
        "keeps a half written checkpoint from being loaded",
    ),
)


def check_core() -> None:
    """Raise unless megatron-core has what the layer needs.

    Raises:
        ConfigurationError: A seam is missing, or megatron-core is not installed.
    """
    _check(_SEAMS)


def check_training() -> None:
    """Raise unless megatron.training has what the command line needs.

    Raises:
        ConfigurationError: A seam is missing, or megatron-core is not installed.
    """
    _check(_SEAMS + _TRAINING_SEAMS)


def _check(seams: tuple[tuple[str, str, str], ...]) -> None:
    for module_name, path, purpose in seams:
        try:
            found: Any = importlib.import_module(module_name)
            for name in path.split("."):
                found = None if _assigns(found, name) else getattr(found, name)
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(
                f"Megatron: got {_version()} without {module_name}.{path} ({error}), with which the plugin "
                f"{purpose}; wanted a release in the tested range: pip install '{TESTED_RANGE}'"
            ) from None


def _assigns(owner: object, name: str) -> bool:
    """Whether some method of a class names an attribute that only its instances have."""
    if not isinstance(owner, type) or hasattr(owner, name):
        return False
    methods = (inspect.unwrap(method) for base in owner.__mro__ for method in vars(base).values())
    return any(name in method.__code__.co_names for method in methods if inspect.isfunction(method))


def _version() -> str:
    try:
        return f"megatron-core {importlib.metadata.version('megatron-core')}"
    except importlib.metadata.PackageNotFoundError:
        return "no megatron-core"
