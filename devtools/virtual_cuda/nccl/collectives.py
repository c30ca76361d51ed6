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
from torch.utils import _pytree as pytree

Touched = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Tensors that a call reads, and tensors that it writes."""

Originals = Mapping[str, Callable[..., Any]]
"""The methods of process groups that were replaced, by name."""


@dataclass(frozen=True)
class Collective:
    """A method of process groups."""

    name: str  # for the log
    touched: Callable[..., Touched]  # by a call with this group and these arguments
    # Does the work over gloo, given the original methods, the group and the arguments. None calls the
    # original method and waits.
    run: Callable[..., None] | None = None


def _in_place(group: ProcessGroup, tensors: Sequence[Tensor], *_: Any, **__: Any) -> Touched:
    return tensors, tensors


def _output_input(group: ProcessGroup, outputs: Any, given: Any, *_: Any, **__: Any) -> Touched:
    return pytree.tree_leaves(given), pytree.tree_leaves(outputs)


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
        flat = pytree.tree_map(lambda tensor: tensor.view(-1), (output, given))
        originals[method](group, *flat, *options).wait()

    return run


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
        raise NotImplementedError("virtual_cuda: reduce_scatter of different sizes can only sum")
    parts = [torch.empty_like(outputs[0]) for _ in range(group.size())]
    _exchange(originals, group, parts, given[0])
    outputs[0].copy_(torch.stack(parts).sum(0))


COLLECTIVES: dict[str, Collective] = {
    "allreduce": Collective("all_reduce", _in_place),
    "allreduce_coalesced": Collective("all_reduce (coalesced)", _in_place),
    "broadcast": Collective("broadcast", _from_root),
    "reduce": Collective("reduce", _to_root),
    "allgather": Collective("all_gather (list)", _output_input, _all_gather),
    "reduce_scatter": Collective("reduce_scatter (list)", _output_input, _reduce_scatter),
    "alltoall": Collective("all_to_all (list)", _output_input, _all_to_all),
    "barrier": Collective("barrier", _nothing),
}
"""By the name of the method of ``ProcessGroup``. Other versions of torch have other names of one call."""

for _name, _methods in {
    "all_gather": "all_gather_single _allgather_base",
    "all_gather (coalesced)": "all_gather_single_coalesced allgather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter_single _reduce_scatter_base",
    "reduce_scatter (coalesced)": "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced",
}.items():
    COLLECTIVES |= {method: Collective(_name, _output_input, _flat(method)) for method in _methods.split()}
for _name, _methods in {
    "all_to_all": "all_to_all_single alltoall_base",
    "gather": "gather gather_single",
    "scatter": "scatter",
}.items():
    COLLECTIVES |= {method: Collective(_name, _output_input) for method in _methods.split()}
