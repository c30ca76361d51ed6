"""Parameters, DDP and optimizer of resident replicas (FlexMoE).

The Parameters belong to no module of the model. The model's norms, number of parameters and checkpoints are
therefore the same as without replicas. DDP and optimizer are second instances of Megatron's own, with the
settings of the model's. Replicas get their owners' gradients, clipped by the model's norm, so that their
contents stay equal to the owners' up to rounding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch.nn import Parameter

from megatron_fssdp.collectives.failure_place import naming_failures
from megatron_fssdp.collectives.sparse.slot_exchange import exchange_slots
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots
from megatron_fssdp.megatron_adapter.experts.resharding import (
    ReshardReport,
    agree_on,
    finish_parameter_gathers,
    synchronized_s,
)
from megatron_fssdp.megatron_adapter.experts.slot_quantities import PartedQuantity, slot_quantities
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.resident_map import ResidentMap
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters

_KEPT_ATTRIBUTES = ("allreduce", "tensor_model_parallel", "partition_dim", "partition_stride")
"""What Megatron reads of an expert's Parameter to reduce and to optimize it."""


class ResidentExperts:
    """Resident slots of a pipeline stage: replicas of experts with gradients and optimizer states.

    Args:
        owned: The stage's layers and the experts that this rank owns.
        slots: Number of resident slots that a device has for each layer.
        model_chunks: DDP's chunks of the model on this rank.
        optimizer: Megatron's optimizer, after it has loaded a checkpoint. From now on its ``step`` also steps
            the replicas.
        expert_data_parallel: Process group of the ranks that hold the same experts as this one.

    Raises:
        ConfigurationError: Experts are not trained, or an optimizer keeps what cannot be copied.
    """

    def __init__(
        self,
        owned: ExpertSlots,
        slots: int,
        model_chunks: Sequence[Any],
        optimizer: Any,
        expert_data_parallel: dist.ProcessGroup,
    ) -> None:
        self._owned, self._model_chunks, self._optimizer = owned, model_chunks, optimizer
        self._expert_data_parallel = expert_data_parallel
        # A stage without MoE layers comes here too: Megatron compares groups of parameters over all ranks.
        num_layers = len(owned.executors)
        templates = owned.parameters[:: len(owned.parameters) // num_layers] if num_layers else []
        if not all(parameter.requires_grad for template in templates for parameter in template):
            raise ConfigurationError(
                "resident replicas: got experts with frozen parameters, wanted trained ones; use another "
                "--moe-strategy"
            )
        self._parameters = [_like(template) for template in templates for _ in range(slots)]
        first = model_chunks[0]
        self._ddp = DistributedDataParallel(
            first.config,
            # What is not finite arrives at the owners too, and is found there.
            replace(
                first.ddp_config,
                overlap_grad_reduce=False,
                overlap_param_gather=False,
                check_for_nan_in_grad=False,
                check_for_large_grads=False,
                num_buckets=None,
                bucket_size=None,
            ),
            _Registered(self._parameters),
            disable_bucketing=True,
        )
        self._resident_optimizer = get_megatron_optimizer(
            # Clipping is the model's; see :meth:`_step`.
            replace(
                optimizer.config,
                clip_grad=0.0,
                timers=None,
                overlap_param_gather=False,
                overlap_param_gather_with_optimizer_step=False,
            ),
            [self._ddp],
        )
        if not num_layers:
            return
        _start_states_like(optimizer, self._resident_optimizer)
        self._quantities()  # found out now and not many iterations later
        optimizer.step = self._stepping(optimizer.step)
        self._map = ResidentMap.empty(num_layers, owned.owners.num_devices, slots)

    @property
    def parameters(self) -> list[ExpertParameters]:
        """The Parameters of each resident slot of this rank, layer by layer."""
        return self._parameters

    def zero_gradients(self) -> None:
        """Set the replicas' gradients to zero before an iteration's passes."""
        self._ddp.zero_grad_buffer()

    @torch.no_grad()
    def hold(self, placements: Sequence[ExpertPlacement]) -> ReshardReport | None:
        """Replace the resident replicas, between iterations; all ranks of the stage's experts must call it.

        Args:
            placements: The new placement of every layer.

        Returns:
            What was moved; ``None`` if nothing changes.

        Raises:
            RuntimeError: The ranks do not have the same placements.
        """
        executors, owners = self._owned.executors, self._owned.owners
        group = executors[0].groups.expert_parallel
        digest = b"".join(placement.digest() for placement in placements)
        agree_on(digest, "the replicas to keep", group, self._expert_data_parallel)
        new = self._map.holding(placements)
        copies = self._map.copies_to(new, owners)
        if not copies and (new.expert_LDW == self._map.expert_LDW).all():
            return None
        device = self._parameters[0][0].device
        started_s = synchronized_s(device)
        quantities = self._quantities()
        finish_parameter_gathers(self._model_chunks)
        with naming_failures("copying resident replicas"):
            exchange_slots(group, copies, quantities, are_copies=True)
        self._map = new
        here = executors[0].groups.device
        for layer, (executor, placement) in enumerate(zip(executors, placements, strict=True)):
            first = layer * new.slots
            held = {
                expert: self._parameters[first + slot] for expert, slot in new.held_by(here, layer).items()
            }
            executor.keep(placement, held)
        slot_bytes = sum(quantity.num_elements * quantity.dtype.itemsize for quantity in quantities)
        return ReshardReport(len(copies), len(copies) * slot_bytes, synchronized_s(device) - started_s)

    def _quantities(self) -> list[PartedQuantity]:
        """Parameters, masters and optimizer states of an expert, in owned slots and in resident slots."""
        self._copy_settings()
        return slot_quantities(
            [*self._owned.parameters, *self._parameters],
            _Chained([self._optimizer, self._resident_optimizer]),
            expert_parallel=self._owned.executors[0].groups.expert_parallel,
            expert_data_parallel=self._expert_data_parallel,
        )

    def _stepping(self, step: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(step)
        def step_both() -> Any:
            self._ddp.finish_grad_sync()
            success, grad_norm, num_zeros = result = step()
            del num_zeros
            if success:
                self._step(grad_norm)
            return result

        return step_both

    @torch.no_grad()
    def _step(self, grad_norm: float | torch.Tensor | None) -> None:
        most = self._optimizer.config.clip_grad
        if most > 0 and grad_norm is not None:
            share = most / (float(grad_norm) + 1e-6)
            if share < 1:
                self._ddp.scale_gradients(share)
        self._copy_settings()
        # Its whole step would form a norm over pipeline stages, some of which may have no replicas.
        self._resident_optimizer.prepare_grads()
        self._resident_optimizer.step_with_ready_grads()

    def _copy_settings(self) -> None:
        """Learning rate, weight decay and whatever else changes in the course of a training."""
        groups = {_identity(group): group for group in _groups(self._optimizer)}
        for group in _groups(self._resident_optimizer):
            settings = groups.get(_identity(group), {})
            group.update({key: value for key, value in settings.items() if key not in _OWN_KEYS})


_OWN_KEYS = ("params", "param_names")


class _Registered(torch.nn.Module):
    """Names Parameters as the model does, which decides about their weight decay."""

    def __init__(self, slots: Sequence[ExpertParameters]) -> None:
        super().__init__()
        for index, slot in enumerate(slots):
            for position, parameter in enumerate(slot):
                linear = torch.nn.Module()
                linear.register_parameter("bias" if parameter.dim() == 1 else "weight", parameter)
                self.add_module(f"expert{index}_{position}", linear)


class _Chained:
    """Two optimizers as Megatron chains them."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.chained_optimizers = [one for optimizer in optimizers for one in _members(optimizer)]


def _like(template: ExpertParameters) -> ExpertParameters:
    """Parameters of zeros with what Megatron knows of an expert's."""
    made = []
    for parameter in template:
        new = Parameter(torch.zeros_like(parameter))
        for name in _KEPT_ATTRIBUTES:
            if hasattr(parameter, name):
                setattr(new, name, getattr(parameter, name))
        made.append(new)
    return tuple(made)


def _members(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    for member in _members(optimizer):
        if not getattr(member, "is_stub_optimizer", False):
            yield from member.optimizer.param_groups


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in param_group_identifier_keys)


def _start_states_like(model: Any, residents: Any) -> None:
    """Create the residents' optimizer states as a loaded model has them: zeros, and the model's counters."""
    states = [
        state
        for member in _members(model)
        if not getattr(member, "is_stub_optimizer", False)
        for state in member.optimizer.state.values()
    ]
    example = next((state for state in states if state), None)
    if example is None:
        return
    for member in _members(residents):
        if getattr(member, "is_stub_optimizer", False):
            continue
        for group in member.optimizer.param_groups:
            for parameter in group["params"]:
                member.optimizer.state[parameter] = {
                    name: torch.zeros_like(parameter)
                    if torch.is_tensor(value) and value.dim()
                    else value.clone()
                    if torch.is_tensor(value)
                    else value
                    for name, value in example.items()
                }
