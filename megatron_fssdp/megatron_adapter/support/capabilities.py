"""Checks that the installed Megatron has the seams that the plugin attaches to.

A seam is a module, class, function or attribute of Megatron that the plugin uses, wraps or subclasses. The
check looks for these names and ignores the version number. A fork or a nightly build that has all of them
works. A release that lacks one is refused before anything runs.
"""

import importlib
import importlib.metadata
import inspect
from typing import Any, NamedTuple

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.support.tested_versions import pip_install


class Seam(NamedTuple):
    """A module, class, function or attribute of Megatron that the plugin attaches to.

    Attributes:
        module: Python module that has it.
        path: Attribute path in the module, for example ``MoELayer.route``.
        purpose: What the plugin does with it; completes a sentence "the plugin ...".
        needed_by: Runs, strategies or options that do not work without it.
    """

    module: str
    path: str
    purpose: str
    needed_by: str


_EVERY_RUN = "every run, --moe-strategy none included"
_PLACEMENT = "every strategy but none"
_EXPERT_PARALLEL = "every strategy but none, on two or more expert-parallel ranks"
_MOVING = "re-sharding (fssdp, smartmoe) and resident replicas (flexmoe)"
_RESHARDING = "re-sharding (fssdp, smartmoe)"


def _seams(by_module: dict[str, list[tuple[str, str, str]]]) -> tuple[Seam, ...]:
    return tuple(Seam(module, *seam) for module, seams in by_module.items() for seam in seams)


_SEAMS = _seams(
    {
        "megatron.core.models.gpt.moe_module_specs": [
            ("MoELayer", "replaces it by the strategy's layer in Megatron's layer specs", _PLACEMENT),
            (
                "get_moe_module_spec",
                "builds layer specs with it",
                "models without a command line (megatron_fssdp.get_moe_module_spec)",
            ),
        ],
        "megatron.core.transformer.moe.moe_layer": [
            ("MoELayer.route", "plans the iteration before the gate", _PLACEMENT),
            ("MoELayer.routed_experts_compute", "runs owned experts and replicas", _PLACEMENT),
        ],
        "megatron.core.transformer.cuda_graphs": [
            ("is_graph_capturing", "keeps plans out of CUDA graphs of the router", _PLACEMENT),
        ],
        "megatron.core.transformer.moe.token_dispatcher": [
            ("MoETokenDispatcher", "dispatches tokens to owners and replicas", _PLACEMENT),
        ],
        "megatron.core.tensor_parallel.random": [
            (
                "CheckpointFunction.forward",
                "keeps exchanges of tokens for recomputed forward passes",
                _PLACEMENT,
            ),
        ],
        "megatron.core.distributed.param_and_grad_buffer": [
            (
                "_ParamAndGradBucketGroup.start_grad_sync",
                "delays the reduction of expert gradients until they are complete",
                _EXPERT_PARALLEL,
            ),
            (
                "_ParamAndGradBucketGroup.finish_grad_sync",
                "completes expert gradients before their reduction",
                _EXPERT_PARALLEL,
            ),
        ],
        "megatron.core.distributed": [
            (
                "DistributedDataParallel._make_forward_pre_hook",
                "gathers experts' parameters before they are used",
                "--overlap-param-gather under every strategy but none",
            ),
        ],
        "megatron.core.transformer.transformer_block": [
            (
                "TransformerBlock.sharded_state_dict",
                "names experts in checkpoints by layer and number, wherever their owners are",
                "checkpoints under re-sharding (fssdp, smartmoe)",
            ),
        ],
        "megatron.core.models.hybrid.hybrid_block": [
            (
                "HybridStack.sharded_state_dict",
                "names experts in checkpoints of hybrid models by layer and number",
                "checkpoints under re-sharding (fssdp, smartmoe)",
            ),
        ],
    }
)

_TRAINING_SEAMS = _seams(
    {
        "megatron.training.arguments": [
            ("add_megatron_arguments", "adds its command-line arguments", _EVERY_RUN),
            ("parse_args", "checks that its arguments were parsed", _EVERY_RUN),
            ("validate_args", "checks its arguments", _EVERY_RUN),
        ],
        "megatron.training.training": [
            ("setup_model_and_optimizer", "checks the built model", _EVERY_RUN),
            ("train", "reports where a run stopped", _PLACEMENT),
            ("evaluate", "records validation losses", _EVERY_RUN),
            ("evaluate_and_print_results", "records validation losses", _EVERY_RUN),
            ("train_step", "begins and ends iterations", _EVERY_RUN),
            ("num_floating_point_operations", "records the operations of an iteration", _EVERY_RUN),
            ("get_forward_backward_func", "detects that an iteration is repeated", _PLACEMENT),
        ],
        "megatron.core.transformer.multi_token_prediction": [
            ("MultiTokenPredictionLayer", "numbers its layers of experts after the decoder's", _PLACEMENT),
        ],
        "megatron.core.transformer.transformer_layer": [
            ("TransformerLayer.mlp", "starts to gather experts while attention computes", _PLACEMENT),
            (
                "TransformerLayer._forward_attention",
                "starts to gather experts while attention computes in the combined schedule",
                _PLACEMENT,
            ),
        ],
        "megatron.core.distributed.param_and_grad_buffer": [
            (
                "_ParamAndGradBucketGroup.finish_param_sync",
                "completes parameters before experts move",
                _MOVING,
            ),
        ],
        "megatron.core.distributed": [
            (
                "DistributedDataParallel.expert_parallel_bucket_groups",
                "completes parameters before experts move",
                _MOVING,
            ),
            (
                "DistributedDataParallel.remove_forward_pre_hook_handles",
                "completes parameters before experts move",
                _MOVING,
            ),
            (
                "DistributedDataParallel.overlap_param_gather_with_optimizer_step",
                "completes parameters before experts move",
                _MOVING,
            ),
        ],
        "megatron.core.optimizer.distrib_optimizer": [
            (
                "DistributedOptimizer._get_model_param_range_map",
                "moves optimizer states between devices",
                f"the distributed optimizer under {_MOVING}",
            ),
        ],
        "megatron.training.checkpointing": [
            ("generate_state_dict", "saves the owner map", _RESHARDING),
            ("dist_checkpointing.load_content_metadata", "loads the owner map", _RESHARDING),
            ("dist_checkpointing.save", "prevents that an incomplete checkpoint is loaded", _PLACEMENT),
        ],
    }
)

_OPTIONAL_SEAMS = _seams(
    {
        "megatron.core.transformer.moe.router": [
            (
                "TopKRouter.router_replay",
                "selects experts by the nodes of their owners",
                "router=topology_aware",
            ),
        ],
        "megatron.core.models.bert.bert_model": [
            ("BertModel", "adds experts to its layers", "BERT with --num-experts"),
        ],
    }
)


def check_core() -> None:
    """Raise unless megatron-core has all seams that the strategy's layer needs.

    Raises:
        ConfigurationError: A seam is missing, or megatron-core is not installed.
    """
    _check(_SEAMS)


def check_training() -> None:
    """Raise unless Megatron has all seams that a training run from the command line needs.

    Raises:
        ConfigurationError: A seam is missing, or megatron-core is not installed.
    """
    _check(training_seams())


def training_seams() -> tuple[Seam, ...]:
    """Return all seams that :func:`check_training` looks for."""
    return _SEAMS + _TRAINING_SEAMS


def optional_seams() -> tuple[Seam, ...]:
    """Return the seams that only single features need.

    A feature checks its seam when it is requested.
    """
    return _OPTIONAL_SEAMS


def absence(seam: Seam) -> Exception | None:
    """Return the error from looking up a seam in the installed Megatron; ``None`` if Megatron has it."""
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
                f"Megatron: got {_version()} without {seam.module}.{seam.path} ({error}), where the "
                f"plugin {seam.purpose}; wanted a release in the tested range: "
                f"{pip_install('megatron-core')}"
            ) from None


def _assigns(owner: object, name: str) -> bool:
    """Whether a class has no attribute ``name``, but its methods use it as an attribute of instances."""
    if not isinstance(owner, type) or hasattr(owner, name):
        return False
    methods = (inspect.unwrap(method) for base in owner.__mro__ for method in vars(base).values())
    return any(name in method.__code__.co_names for method in methods if inspect.isfunction(method))


def _version() -> str:
    try:
        return f"megatron-core {importlib.metadata.version('megatron-core')}"
    except importlib.metadata.PackageNotFoundError:
        return "no megatron-core"
