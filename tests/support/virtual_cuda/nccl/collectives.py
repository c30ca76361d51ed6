"""The table of NCCL's collectives: which tensors each one reads and writes, and how gloo does it.

To add a collective, add the method of ``torch.distributed.ProcessGroup`` that it calls to
:data:`COLLECTIVES`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Touched = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Tensors that a call reads, and tensors that it writes."""

Originals = Mapping[str, Callable[..., Any]]
"""The methods of process groups that were replaced, by name."""


@dataclass(frozen=True)
class Collective:
    """A method of process groups.

    Attributes:
        name: Name for the log.
        touched: From the group and the arguments of the method to the tensors that it reads and writes.
        run: Does the work over gloo, given the original methods, the group and the arguments; None calls the
            original method and waits.
    """

    name: str
    touched: Callable[..., Touched]
    run: Callable[..., None] | None = None


def _in_place(group: ProcessGroup, tensors: Sequence[Tensor], *_: Any, **__: Any) -> Touched:
    return tensors, tensors


def _output_input(group: ProcessGroup, output: Tensor, given: Tensor, *_: Any, **__: Any) -> Touched:
    return [given], [output]


def _outputs_inputs(
    group: ProcessGroup, outputs: Sequence[Tensor], given: Sequence[Tensor], *_: Any, **__: Any
) -> Touched:
    return given, outputs


def _gathered(
    group: ProcessGroup, outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor], *_: Any, **__: Any
) -> Touched:
    return given, [tensor for tensors in outputs for tensor in tensors]


def _scattered(
    group: ProcessGroup, outputs: Sequence[Tensor], given: Sequence[Sequence[Tensor]], *_: Any, **__: Any
) -> Touched:
    return [tensor for tensors in given for tensor in tensors], outputs


def _from_root(group: ProcessGroup, tensors: Sequence[Tensor], opts: Any, *_: Any) -> Touched:
    return (tensors, []) if opts.rootRank == group.rank() else ([], tensors)


def _to_root(group: ProcessGroup, tensors: Sequence[Tensor], opts: Any, *_: Any) -> Touched:
    return tensors, tensors if opts.rootRank == group.rank() else []


def _nothing(group: ProcessGroup, *_: Any, **__: Any) -> Touched:
    return [], []


def _exchange(
    originals: Originals, group: ProcessGroup, outputs: Sequence[Tensor], given: Sequence[Tensor]
) -> None:
    """Send ``given[i]`` to rank i and receive ``outputs[i]`` from it; sizes may differ between ranks."""
    rank = group.rank()
    outputs[rank].copy_(given[rank])
    works = [
        originals["recv"](group, [tensor], peer, 0)
        for peer, tensor in enumerate(outputs)
        if peer != rank and tensor.numel()
    ]
    works += [
        originals["send"](group, [tensor], peer, 0)
        for peer, tensor in enumerate(given)
        if peer != rank and tensor.numel()
    ]
    for work in works:
        work.wait()


def _all_to_all(originals: Originals, group: ProcessGroup, outputs: Any, given: Any, *_: Any) -> None:
    _exchange(originals, group, outputs, given)


def _flat(method: str) -> Callable[..., None]:
    """Call a method with flat tensors: unlike NCCL, gloo also compares the shapes."""

    def run(originals: Originals, group: ProcessGroup, output: Any, given: Any, *options: Any) -> None:
        originals[method](group, _flattened(output), _flattened(given), *options).wait()

    return run


def _flattened(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return tensors.view(-1)
    return [tensor.view(-1) for tensor in tensors]


def _all_gather(originals: Originals, group: ProcessGroup, outputs: Any, given: Any, *_: Any) -> None:
    """NCCL also gathers tensors of different sizes, and gloo does not."""
    if len({tensor.shape for tensor in outputs[0]}) <= 1:
        originals["allgather"](group, outputs, given).wait()
    else:
        _exchange(originals, group, outputs[0], [given[0]] * group.size())


def _reduce_scatter(originals: Originals, group: ProcessGroup, outputs: Any, given: Any, opts: Any) -> None:
    """NCCL also reduces tensors of different sizes, and gloo does not."""
    if len({tensor.shape for tensor in given[0]}) <= 1:
        originals["reduce_scatter"](group, outputs, given, opts).wait()
        return
    if opts.reduceOp != dist.ReduceOp.SUM:
        raise NotImplementedError(
            "virtual_cuda: reduce_scatter of different sizes is implemented for sums only"
        )
    parts = [torch.empty_like(outputs[0]) for _ in range(group.size())]
    _exchange(originals, group, parts, given[0])
    outputs[0].copy_(torch.stack(parts).sum(0))


COLLECTIVES: dict[str, Collective] = {
    "allreduce": Collective("all_reduce", _in_place),
    "allreduce_coalesced": Collective("all_reduce (coalesced)", _in_place),
    "broadcast": Collective("broadcast", _from_root),
    "reduce": Collective("reduce", _to_root),
    "allgather": Collective("all_gather (list)", _gathered, _all_gather),
    "all_gather_single": Collective("all_gather", _output_input, _flat("all_gather_single")),
    "_allgather_base": Collective("all_gather", _output_input, _flat("_allgather_base")),
    "all_gather_single_coalesced": Collective(
        "all_gather (coalesced)", _outputs_inputs, _flat("all_gather_single_coalesced")
    ),
    "allgather_into_tensor_coalesced": Collective(
        "all_gather (coalesced)", _outputs_inputs, _flat("allgather_into_tensor_coalesced")
    ),
    "reduce_scatter": Collective("reduce_scatter (list)", _scattered, _reduce_scatter),
    "reduce_scatter_single": Collective("reduce_scatter", _output_input, _flat("reduce_scatter_single")),
    "_reduce_scatter_base": Collective("reduce_scatter", _output_input, _flat("_reduce_scatter_base")),
    "reduce_scatter_single_coalesced": Collective(
        "reduce_scatter (coalesced)", _outputs_inputs, _flat("reduce_scatter_single_coalesced")
    ),
    "reduce_scatter_tensor_coalesced": Collective(
        "reduce_scatter (coalesced)", _outputs_inputs, _flat("reduce_scatter_tensor_coalesced")
    ),
    "alltoall": Collective("all_to_all (list)", _outputs_inputs, _all_to_all),
    "all_to_all_single": Collective("all_to_all", _output_input),
    "alltoall_base": Collective("all_to_all", _output_input),
    "gather": Collective("gather", _gathered),
    "gather_single": Collective("gather", _output_input),
    "scatter": Collective("scatter", _scattered),
    "barrier": Collective("barrier", _nothing),
}
"""By the name of the method of ``ProcessGroup``. Older versions of torch use the second of two names."""
