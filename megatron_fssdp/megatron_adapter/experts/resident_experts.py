"""Parameters, DDP and optimizer of resident replicas (FlexMoE).

The Parameters belong to no module of the model. The model's norms, number of parameters and checkpoints are
therefore the same as without replicas. DDP and optimizer are second instances of Megatron's classes, with
the model's settings. Replicas get their owners' gradients, divided by the number of tokens where the model's
are, and clipped by the model's norm. So their contents stay equal to the owners' up to rounding. Instead of a
SparseAllGather, a change of replicas copies parameters, master weights and optimizer states.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.tensor_parallel.layers import copy_tensor_model_parallel_attributes
from torch.nn import Parameter

from megatron_fssdp.collectives.all_ranks import check_agreement
from megatron_fssdp.collectives.sparse.slot_exchange import SlotQuantity
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertResharding, ExpertSlots, ReshardReport
from megatron_fssdp.megatron_adapter.experts.slot_quantities import is_layer_wise, members_of
from megatron_fssdp.megatron_adapter.wrapping import wrap
from megatron_fssdp.planning.placement.owner_map import EMPTY, ResidentMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters


class ResidentExperts:
    """Resident slots of a pipeline stage: replicas of experts with gradients and optimizer states.

    The model's optimizer has loaded a checkpoint before. Frozen experts, a layer-wise optimizer and states
    that cannot be copied are refused by a ConfigurationError.
    """

    def __init__(
        self,
        owned: ExpertSlots,
        slots: int,  # that a device has for each layer, beside the owned ones
        model_chunks: Sequence[Any],  # of this rank, wrapped in Megatron's DDP
        optimizer: Any,
        expert_data_parallel: dist.ProcessGroup,  # ranks that hold the same experts
    ) -> None:
        if is_layer_wise(optimizer):
            # It cannot be built for replicas, because it expects parameters that are not of experts.
            raise ConfigurationError(
                "resident replicas: got Megatron's layer-wise optimizer, wanted one that is not; use "
                "--optimizer muon without --use-distributed-optimizer, or another --moe-strategy"
            )
        self._owned, self._optimizer, self._chunks = owned, optimizer, model_chunks
        # A stage without MoE layers also builds DDP and an optimizer, because Megatron compares parameter
        # groups over all ranks.
        num_layers = len(owned.layers)
        templates = owned.parameters[:: len(owned.parameters) // num_layers] if num_layers else []
        if not all(parameter.requires_grad for template in templates for parameter in template):
            raise ConfigurationError(
                "resident replicas: got experts with frozen parameters, wanted trained ones; use another "
                "--moe-strategy"
            )
        # Backward passes of the layers and versions of their gradients when replicas followed last.
        self._followed: tuple[list[int], list[int]] = [], []
        # Of each resident slot of this rank, layer by layer.
        self.parameters = [_like(template) for template in templates for _ in range(slots)]
        first = model_chunks[0]
        self._ddp = DistributedDataParallel(
            first.config,
            # Non-finite gradients also arrive at the owners, where Megatron finds them.
            _changed(
                first.ddp_config,
                overlap_grad_reduce=False,
                overlap_param_gather=False,
                check_for_nan_in_grad=False,
                check_for_large_grads=False,
                num_buckets=None,
                bucket_size=None,
            ),
            # Megatron sets weight decay by the shapes, so the Parameters need no names.
            torch.nn.ParameterList(parameter for slot in self.parameters for parameter in slot),
            disable_bucketing=True,
        )
        self._resident_optimizer = get_megatron_optimizer(
            # Gradients are clipped by the model's norm in :meth:`_step`.
            _changed(
                optimizer.config,
                clip_grad=0.0,
                timers=None,
                overlap_param_gather=False,
                overlap_param_gather_with_optimizer_step=False,
            ),
            [self._ddp],
            use_gloo_process_groups=False,  # A host may have none, and checkpoints do not contain replicas.
        )
        kinds, own = ({type(base) for base, _ in _groups(of)} for of in (optimizer, self._resident_optimizer))
        if not own <= kinds:
            raise ConfigurationError(
                f"resident replicas: got the optimizer {', '.join(sorted(kind.__name__ for kind in kinds))}, "
                f"wanted {', '.join(sorted(kind.__name__ for kind in own))}, which Megatron builds by the "
                "model's settings; use another --moe-strategy"
            )
        if not num_layers:
            return
        _start_states_like(optimizer, self._resident_optimizer)
        self._copy_settings()
        # Parameters, master weights and optimizer states of all owned and resident slots.
        self._contents = ExpertResharding(
            [*owned.parameters, *self.parameters],
            owned.layers[0].groups.expert_parallel,
            expert_data_parallel,
            model_chunks,
            SimpleNamespace(chained_optimizers=[optimizer, self._resident_optimizer]),
        )
        # Megatron scales all model chunks by one factor.
        wrap(first, "scale_gradients", self._scale)
        wrap(first, "finish_grad_sync", self._note_reduction)
        self._is_reduced = False
        self._map = ResidentMap.empty(num_layers, owned.owners.num_devices, slots)

    def zero_gradients(self) -> None:
        """Set the replicas' gradients to zero before an iteration's passes."""
        self._ddp.zero_grad_buffer()
        # Its step has left gradients at the Parameters, to which autograd would add.
        self._resident_optimizer.zero_grad()
        self._followed, self._is_reduced = ([], []), False

    def quantities(self) -> list[SlotQuantity]:
        """What is copied to replicas: see :func:`slot_quantities`."""
        if not self._owned.layers:
            return []
        self._copy_settings()  # The model's may have changed since.
        return self._contents.quantities()

    def hold(self, placements: Sequence[ExpertPlacement]) -> ReshardReport | None:
        """Replace the replicas by those of each layer's placement; all ranks call it between iterations.

        It returns what was copied, or ``None`` if nothing changes. Ranks with other placements are an error.
        """
        digest = b"".join(placement.digest() for placement in placements)
        groups = self._contents.expert_parallel, self._contents.expert_data_parallel
        check_agreement(digest, "the placement of resident replicas", *groups)
        new = self._map.holding(placements)
        copies = self._map.copies_to(new, self._owned.owners)
        if not copies and (new.expert_LDW == self._map.expert_LDW).all():
            return None
        self._copy_settings()
        report = self._contents.move(copies, "copying resident replicas", are_copies=True)
        self._map = new
        for index, (layer, placement) in enumerate(zip(self._owned.layers, placements, strict=True)):
            slot_of = new.held_by(layer.groups.device, index)
            own = self.parameters[index * new.slots :]
            layer.keep(placement, {expert: own[slot] for expert, slot in slot_of.items()})
        return report

    @property
    def holds_any(self) -> bool:
        """Whether a device of this pipeline stage holds a resident replica."""
        return bool(self._owned.layers) and bool((self._map.expert_LDW != EMPTY).any())

    @contextmanager
    def following(self) -> Iterator[None]:
        """Surround what changes gradients of owners and replicas alike; refuse other changes since the last.

        A change between two backward passes is none: the sums after the second one start from the owners'.
        """
        passes, versions = self._seen()
        if self.holds_any and any(passes) and self._followed[0] == passes and self._followed[1] != versions:
            raise ConfigurationError(
                "resident replicas: got gradients of experts that the loop has changed after its backward "
                "passes, wanted only scale_gradients() of DDP, which replicas follow; use another "
                "--moe-strategy"
            )
        yield
        # Sums and reductions on their way change gradients later, which is no change by the loop. Of averages
        # of gloo, the version is counted by its thread.
        groups = (group for chunk in self._chunks for group in chunk.expert_parallel_bucket_groups)
        is_done = all(layer.gradients.is_home for layer in self._owned.layers)
        is_done = is_done and all(group.grad_reduce_handle is None for group in groups)
        self._followed = self._seen() if is_done else ([], [])

    def _seen(self) -> tuple[list[int], list[int]]:
        # All views of a buffer count its versions together.
        buffers = (buffer for chunk in self._chunks for buffer in chunk.expert_parallel_buffers)
        passes = [layer.gradients.num_complete for layer in self._owned.layers]
        return passes, [buffer.grad_data._version for buffer in buffers]

    def _scale(self, scale_gradients: Callable[[Any], None], factor: float | torch.Tensor) -> None:
        # Loops scale, and under --calculate-per-token-loss Megatron divides by the number of tokens.
        scale_gradients(factor)  # All holders have the sums of all passes so far before.
        self._ddp.scale_gradients(factor)

    def _note_reduction(self, reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        reduced = reduce(*args, **kwargs)  # A rank without passes joins in it, and so zeroes gradients.
        self._is_reduced = True
        return reduced

    def begin_step(self) -> None:
        """Reduce the replicas' gradients, before the model's optimizer steps."""
        if not self._owned.layers:
            return
        if self.holds_any and not self._is_reduced:
            raise ConfigurationError(
                "resident replicas: got a step with gradients that DDP has not reduced, wanted "
                "finish_grad_sync() before it, which replicas follow; call it, or use another --moe-strategy"
            )
        self._ddp.finish_grad_sync()
        # Some optimizers count their steps in these settings, so the model's step changes them.
        self._copy_settings()

    @torch.no_grad()
    def step(self, grad_norm: float | torch.Tensor | None) -> None:
        """Step the replicas after the model, whose gradients had this norm."""
        if not self._owned.layers:
            return
        most = self._optimizer.config.clip_grad
        if most > 0:
            if grad_norm is None:
                raise ConfigurationError(
                    "resident replicas: got an optimizer's step_with_ready_grads(), wanted step(), which "
                    "tells the norm by which replicas are clipped; call it, or use another --moe-strategy"
                )
            share = most / (float(grad_norm) + 1e-6)
            if share < 1:
                self._ddp.scale_gradients(share)
        # The optimizer's whole step would compute a norm over all pipeline stages, and some of them may have
        # no replicas.
        self._resident_optimizer.prepare_grads()
        self._resident_optimizer.step_with_ready_grads()

    def _copy_settings(self) -> None:
        # Learning rate, weight decay and others change during a training.
        groups = {_identity(group): group for _, group in _groups(self._optimizer)}
        for _, group in _groups(self._resident_optimizer):
            settings = groups.get(_identity(group), {})
            group.update({k: value for k, value in settings.items() if k not in ("params", "param_names")})


def _changed(config: Any, **changes: Any) -> Any:
    """A copy of a config. Those of Megatron-Bridge are finished by a call, not when they are made."""
    changed = copy(config)
    vars(changed).update(changes)
    return changed


def _like(template: ExpertParameters) -> ExpertParameters:
    """Return Parameters of zeros with the shapes and Megatron's attributes of an expert's Parameters."""
    made: tuple[Any, ...] = tuple(Parameter(torch.zeros_like(parameter)) for parameter in template)
    for new, parameter in zip(made, template, strict=True):
        copy_tensor_model_parallel_attributes(new, parameter)
        new.allreduce = getattr(parameter, "allreduce", True)
    return made


def _groups(optimizer: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the optimizers of torch inside Megatron's, with each of their parameter groups."""
    for member in members_of(optimizer):
        for group in member.optimizer.param_groups:
            yield member.optimizer, group


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in param_group_identifier_keys)


def _start_states_like(model: Any, residents: Any) -> None:
    """If the model has states already, create those of resident slots: zeros, with the model's counters."""
    # Muon leaves biases to Adam, so a parameter gets the states of a group with the same settings.
    examples: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for optimizer, group in _groups(model):
        for parameter in group["params"]:
            if optimizer.state.get(parameter):
                examples.setdefault(_identity(group), optimizer.state[parameter])
    if not examples:
        return
    # This rank's part of a distributed optimizer may have no parameter of a group.
    some = next(iter(examples.values()))
    for optimizer, group in _groups(residents):
        for parameter in group["params"]:
            state = optimizer.state[parameter] = dict(examples.get(_identity(group), some))
            for name, value in state.items():
                if torch.is_tensor(value):
                    state[name] = torch.zeros_like(parameter) if value.dim() else value.clone()
