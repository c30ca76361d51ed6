"""What CUDA's devices, streams and events, and a few functions of torch and Megatron, are on the CPU."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_fssdp.collectives.gathered_counts import gather_counts
from megatron_fssdp.collectives.messages import exchange

_CPU = torch.device("cpu")
_IDENTITIES = (Tensor.cuda, Tensor.pin_memory)
_CHANGED = frozenset({*_IDENTITIES, Tensor.to, Tensor.type})
_FEW_BYTES = 4096  # Few enough that the number of hops decides how long they travel.
_ROWS_TAG = 1 << 20  # above all tags of the sparse collectives, which can have the same group


def _is_accelerator(device: object) -> bool:
    if isinstance(device, (int, str, torch.device)) and not isinstance(device, bool):
        return isinstance(device, int) or str(device).startswith("cuda")
    return False


class CpuDeviceMode(TorchFunctionMode):
    """Replaces CUDA device arguments of all torch functions by the CPU while it is active."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not kwargs and func not in _CHANGED:  # Also attributes of tensors come here, so this is frequent.
            return func(*args)
        kwargs = dict(kwargs or {})
        if _is_accelerator(kwargs.get("device")):
            kwargs["device"] = _CPU
        if func in _IDENTITIES:
            return args[0]
        if func is Tensor.to and len(args) > 1 and _is_accelerator(args[1]):
            args = (args[0], _CPU, *args[2:])
        elif func is Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers group parameters by this string. They compare it with
            # 'torch.cuda.FloatTensor' and similar names.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class FinishedStream:
    """A ``torch.cuda.Stream`` whose work is always done, so nothing waits."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None:
        """Return at once."""

    wait_event = synchronize = wait_stream

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        """Return the event, or a new one."""
        return event or HostEvent()


class HostEvent(torch.cpu.Event):
    """Torch's event of the CPU, for which nothing waits, with the time of the host."""

    def __init__(self, *_: object, **__: object) -> None:
        self._time_s = 0.0

    def record(self, *_: object) -> None:
        """Record the current time."""
        self._time_s = time.perf_counter()

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds from this event to a later event."""
        return (end._time_s - self._time_s) * 1e3


def inside_the_device_mode(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run backward passes inside :class:`CpuDeviceMode`, which recomputed forward passes need.

    Torch removes a function mode while one of its own functions runs, such as ``torch.autograd.backward``.
    """
    if torch._C._len_torch_function_stack():
        return run(*args, **kwargs)
    with CpuDeviceMode():
        return run(*args, **kwargs)


def without_device_ids(barrier: Any, *args: Any, device_ids: object = None, **kwargs: Any) -> Any:
    """Call ``torch.distributed.barrier`` without ``device_ids``, which only NCCL accepts."""
    return barrier(*args, **kwargs)


def all_gather_in_one_hop(
    all_gather: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Send a few bytes, such as counts of tokens, to every rank directly.

    Gloo passes them around a ring. Each hop would wait behind transfers of experts on the same links.
    """
    if async_op or input_tensor.nbytes > _FEW_BYTES:
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
    group = group or dist.group.WORLD
    gathered = gather_counts(input_tensor.reshape(-1).view(torch.uint8), group)
    output_tensor.view(-1).view(torch.uint8).copy_(gathered.view(-1))
    return None


def all_to_all_at_once(
    all_to_all: Any,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Post the messages of an all-to-all at once, receives first, as NCCL does; gloo's own takes longer."""
    if async_op:
        return all_to_all(output, input, output_split_sizes, input_split_sizes, group, async_op)
    group = group or dist.group.WORLD
    own, size = group.rank(), group.size()
    received, sent = (
        rows.split([len(rows) // size] * size if sizes is None else [int(number) for number in sizes])
        for rows, sizes in ((output, output_split_sizes), (input, input_split_sizes))
    )
    ahead = [(own + step) % size for step in range(size)]
    to, behind = [(peer, sent[peer]) for peer in ahead], [(peer, received[peer]) for peer in reversed(ahead)]
    return exchange(to, behind, group, _ROWS_TAG)


def uneven_all_gather(
    all_gather: Any, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Accept tensors of different sizes, which expert tensor parallelism has, as NCCL does."""
    if async_op or _equal_sizes(tensor_list):
        return all_gather(tensor_list, tensor, group=group, async_op=async_op)
    sizes = [piece.numel() for piece in tensor_list]
    copies = tensor.reshape(-1).repeat(len(tensor_list))
    received = copies.new_empty(sum(sizes))
    dist.all_to_all_single(received, copies, sizes, [tensor.numel()] * len(sizes), group=group)
    for piece, values in zip(tensor_list, received.split(sizes), strict=True):
        piece.copy_(values.view_as(piece))
    return None


def uneven_reduce_scatter(
    reduce_scatter: Callable[..., Any],
    output: Tensor,
    input_list: list[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Accept tensors of different sizes, and add them in rank order; half precision is added in fp32."""
    if async_op or op != dist.ReduceOp.SUM or _equal_sizes(input_list):
        return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    sizes = [piece.numel() for piece in input_list]
    parts = output.new_empty(len(sizes), *output.shape)
    rows = torch.cat([piece.reshape(-1) for piece in input_list])
    dist.all_to_all_single(parts.view(-1), rows, [output.numel()] * len(sizes), sizes, group=group)
    output.copy_(parts.sum(dim=0))
    return None


def _equal_sizes(tensors: Sequence[Tensor]) -> bool:
    # All ranks have lists of the same sizes, so all of them take the same branch.
    return len({tensor.shape for tensor in tensors}) <= 1


def move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the tensor, which is on the host already; the signature is Megatron's."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def norm_under_sequence_parallelism(new: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Build one of torch's norms also under sequence parallelism, which Megatron refuses.

    Only an attribute of their parameters is missing, by which Megatron sums gradients over tensor ranks.
    """
    sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
    try:
        norm = new(cls, config, *args, **kwargs)
    finally:
        config.sequence_parallel = sequence_parallel
    for parameter in norm.parameters():
        parameter.sequence_parallel = sequence_parallel
    return norm


def attention_of_other_widths(
    build: Any, attention: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any
) -> None:
    """Build Megatron's attention also for the widths of multi-latent attention.

    The class computes with any width, but takes that of ordinary heads from the config.
    """
    build(attention, *args, **kwargs)
    if v_channels is not None:
        attention.hidden_size_per_partition = attention.num_attention_heads_per_partition * v_channels
    if k_channels is not None:
        attention.hidden_size_per_attention_head = k_channels


def experts_of_this_rank(
    build: Any,
    experts: Any,
    num_local_experts: int,
    config: Any,
    submodules: Any,
    pg_collection: Any = None,
    **kwargs: Any,
) -> None:
    """Build Megatron's experts with a seed for each expert-parallel rank, as it does on GPUs.

    On the CPU all expert-parallel ranks would start with copies of the same experts. Ranks that hold parts or
    copies of the same experts still draw the same numbers, and so do all ranks for the layers that follow.
    """
    group = getattr(pg_collection, "ep", None)
    if group is None or group.size() == 1 or not config.use_cpu_initialization:
        return build(experts, num_local_experts, config, submodules, pg_collection, **kwargs)
    seed = int(torch.randint(2**62, ()))  # another one for each layer
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed + group.rank())
        return build(experts, num_local_experts, config, submodules, pg_collection, **kwargs)
