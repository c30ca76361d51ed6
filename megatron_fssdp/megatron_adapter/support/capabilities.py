"""Whether the installed Megatron has the seams that the plugin hangs on.

Detected by symbol, not by version string: a fork or a nightly build with the seams
works, a release without them is refused before anything runs.
"""

import importlib
import importlib.metadata
import inspect
from typing import Any, NamedTuple

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.support.tested_versions import pip_install


class Seam(NamedTuple):
    """A place in Megatron that the plugin hangs on.

    Attributes:
        module: Where it is.
        path: Its attribute path there.
        purpose: What the plugin does with it.
        needed_by: What would not work without it.
    """

    module: str
    path: str
    purpose: str
    needed_by: str


_EVERY_RUN = "every run, --moe-strategy none included"
_PLACEMENT = "every strategy but none"
_EXPERT_PARALLEL = "every strategy but none, on two or more expert-parallel ranks"
_MOVING = "re-sharding (fssdp, smartmoe) and replicas that stay (flexmoe)"
_RESHARDING = "re-sharding (fssdp, smartmoe)"

_SEAMS = (
    Seam(
        "megatron.core.models.gpt.moe_module_specs",
        "MoELayer",
        "puts its layer into Megatron's own specs",
        _PLACEMENT,
    ),
    Seam(
        "megatron.core.models.gpt.moe_module_specs",
        "get_moe_module_spec",
        "builds layer specs",
        "models without a command line (megatron_fssdp.get_moe_module_spec)",
    ),
    Seam("megatron.core.transformer.moe.moe_layer", "MoELayer.route", "plans before the gate", _PLACEMENT),
    Seam(
        "megatron.core.transformer.moe.moe_layer",
        "MoELayer.routed_experts_compute",
        "runs the experts",
        _PLACEMENT,
    ),
    Seam(
        "megatron.core.transformer.moe.token_dispatcher",
        "MoETokenDispatcher",
        "dispatches tokens",
        _PLACEMENT,
    ),
    Seam(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.start_grad_sync",
        "orders the expert gradients' reduction",
        _EXPERT_PARALLEL,
    ),
    Seam(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.finish_grad_sync",
        "orders the expert gradients' reduction",
        _EXPERT_PARALLEL,
    ),
    Seam(
        "megatron.core.distributed",
        "DistributedDataParallel._make_forward_pre_hook",
        "has experts' parameters gathered before they are used",
        "--overlap-param-gather under every strategy but none",
    ),
    Seam(
        "megatron.core.transformer.transformer_block",
        "TransformerBlock.sharded_state_dict",
        "names experts in checkpoints by their owners",
        "checkpoints under re-sharding (fssdp, smartmoe)",
    ),
)

_TRAINING_SEAMS = (
    Seam("megatron.training.arguments", "add_megatron_arguments", "adds its arguments", _EVERY_RUN),
    Seam("megatron.training.arguments", "parse_args", "adds its arguments", _EVERY_RUN),
    Seam("megatron.training.arguments", "validate_args", "checks its arguments", _EVERY_RUN),
    Seam("megatron.training.training", "setup_model_and_optimizer", "checks the built model", _EVERY_RUN),
    Seam("megatron.training.training", "train", "says where a run stopped", _PLACEMENT),
    Seam("megatron.training.training", "train_step", "marks iterations", _EVERY_RUN),
    Seam(
        "megatron.training.training",
        "get_forward_backward_func",
        "notices that an iteration is repeated",
        _PLACEMENT,
    ),
    Seam(
        "megatron.core.transformer.transformer_layer",
        "TransformerLayer.mlp",
        "starts to gather experts under the attention",
        _PLACEMENT,
    ),
    Seam(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.finish_param_sync",
        "completes parameters before experts move",
        _MOVING,
    ),
    Seam(
        "megatron.core.distributed",
        "DistributedDataParallel.expert_parallel_bucket_groups",
        "completes parameters before experts move",
        _MOVING,
    ),
    Seam(
        "megatron.core.distributed",
        "DistributedDataParallel.remove_forward_pre_hook_handles",
        "completes parameters before experts move",
        _MOVING,
    ),
    Seam(
        "megatron.core.distributed",
        "DistributedDataParallel.overlap_param_gather_with_optimizer_step",
        "completes parameters before experts move",
        _MOVING,
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._get_model_param_range_map",
        "moves optimizer states between devices",
        f"the distributed optimizer under {_MOVING}",
    ),
    Seam("megatron.training.checkpointing", "generate_state_dict", "saves the owner map", _RESHARDING),
    Seam(
        "megatron.training.checkpointing",
        "dist_checkpointing.load_content_metadata",
        "takes the owner map up again",
        _RESHARDING,
    ),
    Seam(
        "megatron.training.checkpointing",
        "dist_checkpointing.save",
        "keeps a half written checkpoint from being loaded",
        _PLACEMENT,
    ),
)

_OPTIONAL_SEAMS = (
    Seam(
        "megatron.core.transformer.moe.router",
        "TopKRouter.router_replay",
        "chooses experts by nodes",
        "router=topology_aware",
    ),
    Seam(
        "megatron.core.models.bert.bert_model",
        "BertModel",
        "puts experts into its layers",
        "BERT with --num-experts",
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
    _check(training_seams())


def training_seams() -> tuple[Seam, ...]:
    """All that :func:`check_training` wants."""
    return _SEAMS + _TRAINING_SEAMS


def optional_seams() -> tuple[Seam, ...]:
    """What single features want, which say so when they are asked for and it is missing."""
    return _OPTIONAL_SEAMS


def absence(seam: Seam) -> Exception | None:
    """Why the installed Megatron lacks a seam; ``None`` if it has it."""
    try:
        found: Any = importlib.import_module(seam.module)
        for name in seam.path.split("."):
            found = None if _assigns(found, name) else getattr(found, name)
    except (ImportError, AttributeError) as error:
        return error
    return None


def _check(seams: tuple[Seam, ...]) -> None:
    for seam in seams:
        if (error := absence(seam)) is not None:
            raise ConfigurationError(
                f"Megatron: got {_version()} without {seam.module}.{seam.path} ({error}), with which the "
                f"plugin {seam.purpose}; wanted a release in the tested range: "
                f"{pip_install('megatron-core')}"
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
