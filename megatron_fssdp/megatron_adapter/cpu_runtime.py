"""Runs Megatron on CPU ranks over gloo, for laptops, tests and CI.

Megatron assumes CUDA in many places: factories with ``device="cuda"``, streams,
CUDA random states, NCCL-only arguments. Without an accelerator, :func:`install`
answers those calls with their CPU meaning. On a machine with an accelerator it
does nothing, unless ``MEGATRON_FSSDP_DEVICE=cpu`` asks for CPU.

Two kinds of change, both listed here and nowhere else:

* a :class:`torch.overrides.TorchFunctionMode` that turns CUDA device arguments
  into CPU ones, one rule instead of a wrapper per factory;
* :data:`_TORCH_PATCHES` and :data:`_MEGATRON_PATCHES`: attributes replaced, each
  with its reason. ``torch.cuda.is_available()`` stays (or becomes) ``False``:
  claiming otherwise breaks dynamo and ``torch.optim``.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_fssdp.config.errors import ConfigurationError

DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"

_CPU = torch.device("cpu")
_installed = False


def requested() -> bool:
    """Whether this process should run Megatron on the CPU."""
    asked = os.environ.get(DEVICE_VARIABLE, "").lower()
    if asked not in ("", "cpu", "cuda"):
        raise ConfigurationError(
            f"{DEVICE_VARIABLE}: got {asked!r}, wanted 'cpu', 'cuda' or nothing; "
            "unset it to detect the device"
        )
    return asked == "cpu" or (asked == "" and not torch.cuda.is_available())


def install() -> bool:
    """Apply the CPU runtime when it is requested; idempotent.

    Returns:
        Whether the CPU runtime is active in this process.
    """
    global _installed
    if not requested():
        return False
    if not _installed:
        _installed = True
        # Megatron asks for this variable at argument checks of TP or CP > 1; it
        # orders CUDA work queues and means nothing here.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # Entered for the life of the process.
        _CpuDeviceMode().__enter__()
        for patch in _TORCH_PATCHES:
            patch.apply()
        for patch in _MEGATRON_PATCHES:
            patch.apply()
    return True


def check_arguments(args: Any) -> None:
    """Refuse what Megatron would do wrongly on the CPU without a word.

    Without Transformer Engine or Apex, the distributed optimizer loads weights but makes all
    parameters share one Adam step, which then counts once per parameter.

    Raises:
        ConfigurationError: A run would go on from such optimizer state.
    """
    if not _installed or not args.use_distributed_optimizer or args.load is None:
        return
    starts_anew = not (Path(args.load) / "latest_checkpointed_iteration.txt").exists()
    if not (starts_anew or args.no_load_optim or args.finetune):
        raise ConfigurationError(
            f"--load {args.load}: got --use-distributed-optimizer on the CPU, where Megatron does not "
            "restore its Adam state correctly; wanted the plain optimizer, or --no-load-optim to start "
            "the optimizer anew"
        )


# ---------------------------------------------------------------- device arguments


def _is_accelerator(device: object) -> bool:
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


class _CpuDeviceMode(TorchFunctionMode):
    """Every CUDA device argument of every torch function means the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and kwargs["device"] is not None and _is_accelerator(kwargs["device"]):
            kwargs["device"] = _CPU
        if func in _IDENTITIES:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_device_argument(args[1]):
            args = (args[0], _CPU, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers group parameters by comparing this string with
            # 'torch.cuda.FloatTensor' and its relatives.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


_IDENTITIES = (torch.Tensor.cuda, torch.Tensor.pin_memory)


def _is_device_argument(argument: object) -> bool:
    return isinstance(argument, (str, int, torch.device)) and _is_accelerator(argument)


# ---------------------------------------------------------------- torch.cuda objects


class _Stream:
    """A stream on which everything has happened already."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        return event or _Event()


class _Event:
    """An event that records host time."""

    def __init__(self, *_: object, **__: object) -> None:
        self._time_s = 0.0

    def record(self, *_: object) -> None:
        self._time_s = time.perf_counter()

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return (end._time_s - self._time_s) * 1e3


_STREAM = _Stream()


# ---------------------------------------------------------------- patches


@dataclass(frozen=True)
class _Patch:
    """One attribute replaced, and why."""

    target: str
    names: str
    replacement: Callable[[Any], Any]
    reason: str

    def apply(self) -> None:
        owner = _resolve(self.target)
        for name in self.names.split():
            setattr(owner, name, self.replacement(getattr(owner, name)))


def _resolve(target: str) -> Any:
    """``package.module`` or ``package.module:Class``."""
    module, _, attribute = target.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, attribute) if attribute else owner


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _returning(value: Any) -> Callable[[Any], Any]:
    # A fresh function for every name: dynamo refuses one object under two names.
    return lambda original: lambda *_, **__: value


def _without_device_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return original(*args, **kwargs)

    return call


def _inside_the_device_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Python code of a backward pass sees the device mode as that of a forward pass does.

    Torch takes a mode off while one of its own functions runs. ``torch.autograd.backward``
    is such a function, and a recomputed forward runs inside it.
    """

    @functools.wraps(original)
    def apply(self: Any, *args: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return original(self, *args)
        with _CpuDeviceMode():
            return original(self, *args)

    return apply


_TORCH_PATCHES = (
    _Patch("torch.cuda", "is_available", _returning(False), "CPU was asked for on a GPU machine"),
    _Patch(
        "torch.cuda", "device_count", _returning(1), "0 makes Megatron skip its process groups and seeding"
    ),
    _Patch("torch.cuda", "current_device", _returning(0), "passed on as a device argument"),
    _Patch("torch.cuda", "set_device synchronize", _returning(None), "no device to set or wait for"),
    _Patch("torch.cuda", "Stream", _always(_Stream), "side streams of dispatcher and optimizer"),
    _Patch("torch.cuda", "Event", _always(_Event), "timers and stream ordering"),
    _Patch("torch.cuda", "current_stream", _returning(_STREAM), "stream ordering"),
    _Patch("torch.cuda", "stream", _returning(contextlib.nullcontext()), "side streams"),
    _Patch("torch.cuda", "memory_stats", _returning(defaultdict(int)), "--log-memory-to-tensorboard"),
    _Patch(
        "torch.cuda",
        "get_device_properties",
        _returning(types.SimpleNamespace(major=0, minor=0, total_memory=0, name="cpu")),
        "argument checks of tensor and context parallelism",
    ),
    # The one CPU generator stands in for the CUDA generator.
    _Patch(
        "torch.cuda",
        "manual_seed",
        _always(lambda seed: torch.default_generator.manual_seed(seed)),
        "model-parallel seeding",
    ),
    _Patch(
        "torch.cuda",
        "get_rng_state",
        _always(lambda *_, **__: torch.get_rng_state()),
        "checkpoints, recompute",
    ),
    _Patch(
        "torch.cuda",
        "set_rng_state",
        _always(lambda state, *_, **__: torch.set_rng_state(state)),
        "checkpoints, recompute",
    ),
    _Patch(
        "torch.autograd.function:BackwardCFunction",
        "apply",
        _inside_the_device_mode,
        "activation recompute runs forward code inside torch.autograd.backward",
    ),
    _Patch("torch.distributed", "barrier", _without_device_ids, "an NCCL-only argument that gloo refuses"),
)


def _move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _norm_under_sequence_parallelism(original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's norms refuse sequence parallelism; they only lack the mark.

    With the mark on their parameters, Megatron's finalize step sums their
    gradients over the tensor-parallel ranks as it does for its own norms.
    """

    def build(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config, hidden_size, eps, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    return build


def _find_dataset_helpers(original: Callable[[], None]) -> Callable[[], None]:
    """Use compiled dataset helpers that exist already; compile only without any.

    The wheel ships them without a Makefile. A Megatron-LM checkout has the Makefile
    but wants pybind11 and a compiler; the installed wheel's serve it as well.
    """
    name = "megatron.core.datasets.helpers_cpp"
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        return lambda: None
    for file in importlib.metadata.files("megatron-core") or ():
        if file.name.startswith("helpers_cpp.") and file.suffix == ".so":
            spec = importlib.util.spec_from_file_location(name, str(file.locate()))
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[name] = module
            return lambda: None
    return original


_MEGATRON_PATCHES = (
    _Patch(
        "megatron.core.datasets.utils",
        "compile_helpers",
        _find_dataset_helpers,
        "runs make, which the wheel cannot and a bare machine may not",
    ),
    _Patch(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        _always(lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)),
        "random state of dropout under recompute",
    ),
    _Patch(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        _always(lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()),
        "random state of dropout under recompute",
    ),
    _Patch(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _always(_move_to_host),
        "turns split sizes into numbers only when they are CUDA tensors; gloo wants numbers",
    ),
    _Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm",
        "__new__",
        _norm_under_sequence_parallelism,
        "sequence parallelism without Transformer Engine or Apex",
    ),
    _Patch(
        "megatron.training.training",
        "initialize_megatron",
        lambda original: functools.partial(original, allow_no_cuda=True),
        "pretrain() does not pass the flag on",
    ),
)
