"""The iterations of one model, whatever loop trains it.

An iteration is what lies between two resets of gradients. It begins with the first training pass and ends
after the optimizer's step. A reset before that drops it. Nothing here depends on how many passes come, or how
many calls of a schedule they are in.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from posixpath import commonpath
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from megatron_fssdp.collectives.all_ranks import of_all_ranks
from megatron_fssdp.collectives.device_clock import synchronized_s
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import KEEP_OWNERS
from megatron_fssdp.megatron_adapter.iterations.host_settings import (
    HostModel,
    check_equal,
    optimizer_of,
    planning_facts,
)
from megatron_fssdp.megatron_adapter.iterations.iteration_driver import IterationDriver
from megatron_fssdp.megatron_adapter.iterations.run_recorder import RunRecorder, check_layers, describe_run
from megatron_fssdp.megatron_adapter.iterations.stage_records import IterationFacts
from megatron_fssdp.megatron_adapter.iterations.stock_loads import stock_runtime
from megatron_fssdp.megatron_adapter.iterations.training_reports import report_installation
from megatron_fssdp.megatron_adapter.layer.moe_layer import install_beginnings
from megatron_fssdp.megatron_adapter.wrapping import wrap
from megatron_fssdp.runtime.layers.moe_runtime import MoERuntime
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer


@dataclass(eq=False)
class ModelIterations(HostModel):
    """Begins, ends and drops the iterations of a model."""

    def __post_init__(self) -> None:
        self.driver: IterationDriver | None = None
        self.recorder: RunRecorder | None = None
        self._is_known = False  # The optimizer was found, and all that needs it was built.
        self._is_frozen = False  # No rank has a parameter that trains.
        self._is_prepared = False  # for the coming iteration
        self._is_open = False
        self._is_by_hand = False  # No schedule has told of passes in the open iteration.
        self._is_scheduled = False  # A schedule runs passes.
        self.is_stepping = False  # Optimizers step, which call each other.
        self._is_zero = True  # Gradients were set to zero since the iteration began, or since the last one.
        self._mixes = False  # Experts have moved, and gradients of others were kept in their slots.
        self._num_done = 0
        self._facts = IterationFacts()
        self._began_s = 0.0
        self._stock: MoERuntime | None = None  # under none, with records
        if self.session is not None:
            self.session.slots.before_home, self.session.slots.on_move = self._leave, self._note_move
            self.session.runtime.measure |= self.host.has_boards  # Layers read this when they join.

    def add(self, ddp: Any) -> None:
        """Add a chunk that DDP has wrapped."""
        self.chunks.append(ddp)
        if self.session is not None:
            install_beginnings(ddp)
        if (root := _root_of(ddp)) is not None:
            wrap(root, "forward", partial(self._run_root, root))

    def _run_root(self, root: torch.nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of what contains a chunk's layers; loops without a schedule begin here."""
        clock = None if self.session is None else self.session.runtime.clock
        # A schedule that trains runs backward passes in whatever mode the model is.
        trains = torch.is_grad_enabled() and (root.training or self._is_scheduled)
        if trains and not self._is_open and (clock is None or not clock.driven):
            self.begin(0)
            self._is_by_hand = True
        if not trains and self._is_open:
            with self.evaluation():
                return forward(*args, **kwargs)
        if self._is_open and self.driver is not None:
            self.driver.check_replicas()
        results = forward(*args, **kwargs)
        if trains and not self._is_scheduled:
            for leaf in tree_leaves(results):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._finish_after_backward)
        return results

    def _finish_after_backward(self, _: torch.Tensor) -> None:
        # A loop without a schedule may read gradients when backward() returns.
        Variable._execution_engine.queue_callback(self.finish_gradients)

    def begin(self, num_micro_batches: int) -> None:
        """Begin an iteration, or go on with it, before passes of so many micro-batches; 0 if unknown.

        Collective over the ranks of the model.
        """
        if not self._is_known:
            self._is_known = True
            self._know(num_micro_batches)
        if self._is_frozen:
            return
        if self._is_open:
            if self.session is not None:
                self.session.runtime.expect(num_micro_batches)
            if self.driver is not None:
                self.driver.check_weights()
                self.driver.renew_replicas()
            return
        self._is_open, self._began_s, self._facts = True, time.perf_counter(), IterationFacts()
        if self._stock is not None:
            self._stock.begin_iteration()
        if self.driver is not None:
            self.driver.check_weights()
            if not self._is_prepared:  # An iteration that was dropped is not prepared again.
                self.driver.prepare(self.num_done, num_micro_batches)
            self._is_prepared = True
            self._facts.reshard, self._facts.selection = self.driver.reshard, self.driver.selection
            self.driver.begin(self.num_done, num_micro_batches)
        self._is_zero = False

    def join(self) -> None:
        """Begin an iteration in which this rank runs no passes, before it shares gradients with others.

        What happens between iterations is collective, also over ranks with other numbers of micro-batches.
        """
        if not self._is_open:
            self.begin(0)

    @property
    def num_done(self) -> int:
        """Complete iterations, as the host counts them, or as many as were seen, also before a resume."""
        return self._num_done if self.host.iteration is None else self.host.iteration()

    @contextmanager
    def passes(self, num_micro_batches: int) -> Iterator[IterationFacts]:
        """Surround the passes of a schedule, which are timed if the iteration is recorded."""
        self.begin(num_micro_batches)
        self._is_by_hand, self._is_scheduled = False, True
        started_s = time.perf_counter()
        try:
            yield self._facts
        finally:
            self._is_scheduled = False
        if self.recorder is not None and self.recorder.wants_iteration(self.num_done + 1):
            # This wait costs nothing: the optimizer waits for the gradients' norm anyway.
            self._facts.passes_s += synchronized_s() - started_s

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Surround forward passes without backward passes, inside of an iteration or outside."""
        if self.session is None:
            yield
            return
        if self.driver is not None:
            self.driver.check_weights()
        with self.session.runtime.evaluation():
            yield

    def finish_gradients(self) -> None:
        """Bring the gradients of replicas home, before anybody reads or changes gradients. Collective."""
        if self.session is not None:
            with self.following():
                self.session.runtime.finish_gradients()

    def following(self) -> AbstractContextManager[None]:
        """Surround changes of gradients by Megatron's DDP, or by transfers."""
        return nullcontext() if self.driver is None else self.driver.following()

    def drop(self) -> None:
        """Drop an iteration, where gradients are set to zero; one without backward passes yet goes on."""
        self._is_zero, self._mixes = True, False
        for layer in self._layers:
            layer.gradients.passes_residents = False
        if self._may_have_gradients:
            self._drop()

    @property
    def _layers(self) -> Sequence[SlotLayer]:
        return () if self.session is None else self.session.runtime.layers

    @property
    def _may_have_gradients(self) -> bool:
        return not self._is_by_hand or any(layer.gradients.has_begun for layer in self._layers)

    def _drop(self) -> None:
        if self._is_open and self.driver is not None:
            self.driver.drop()
        self._is_open = self._is_by_hand = False

    def _leave(self) -> None:
        has_begun = self._is_open and (self._may_have_gradients or not self._is_zero)
        # Megatron-LM saves in the middle of an iteration that has failed twice, and then exits.
        if has_begun and (self._is_scheduled or self.host.exports_by_name):
            raise ConfigurationError(
                f"--moe-strategy {self.name}: got experts that shall go home in the middle of an iteration, "
                "wanted this between two; restore owners or save after the optimizer's step"
            )
        self._drop()
        self._is_open = has_begun  # A step with these gradients is refused, because experts move.

    def _note_move(self) -> None:
        self._mixes = not self._is_zero or (self._is_open and self._has_gradients())
        if self.driver is not None:
            self.driver.note_weights()

    def _has_gradients(self) -> bool:
        # Passes that begin no iteration, as in eval mode without a schedule, leave gradients, too.
        slots = () if self.session is None else self.session.slots.parameters
        nonzero = [p.main_grad.any() for slot in slots for p in slot if hasattr(p, "main_grad")]
        return bool(nonzero) and bool(torch.stack(nonzero).any())

    def begin_step(self, optimizer: Any) -> bool:
        """Bring gradients home before an optimizer's step; return whether it ends an iteration."""
        if self._is_zero and self._is_known:
            self.join()
        # A second optimizer of the model steps, or the model is frozen.
        if not self._is_open or self.is_stepping:
            return False
        if self._mixes:
            raise ConfigurationError(
                f"--moe-strategy {self.name}: got gradients that are kept while experts move, wanted "
                "zero_grad_buffer() in each iteration, and then passes in training mode; call it, or "
                f"{KEEP_OWNERS}"
            )
        if any(layer.gradients.passes_residents for layer in self._layers):
            raise ConfigurationError(
                f"--moe-strategy {self.name}: got gradients of which resident replicas have none, wanted all "
                "backward passes in training mode, and after zero_grad_buffer(); use another --moe-strategy"
            )
        if self.driver is not None:
            self.driver.begin_step(optimizer)
        if self._stock is not None:
            self._stock.end_passes()
        self.is_stepping = True
        return True

    def note_more_steps(self) -> None:
        """Note that an optimizer has stepped, which may be after the end of the iteration."""
        if self.driver is not None and not self._is_open:
            self.driver.note_more_steps()

    def end_step(self, has_stepped: bool, grad_norm: Any, *_: Any) -> None:
        """End the iteration after the optimizer's step, with its results."""
        if self.driver is not None:
            self.driver.end_step(has_stepped, grad_norm)
        self._is_open = self._is_prepared = self._is_by_hand = self._is_zero = False
        loads = [] if self.driver is None else self.driver.end()
        if self._stock is not None:
            loads = self._stock.end_iteration()
        number = self.num_done + 1
        self._num_done += 1
        if self.recorder is not None and self.recorder.wants_iteration(number):
            self._facts.iteration_s = synchronized_s() - self._began_s
            self._facts.grad_norm = grad_norm
            self.recorder.record(number, self._facts, loads)

    def _know(self, num_micro_batches: int) -> None:
        """Check all that is known once a model is about to train, and build what needs its optimizer."""
        optimizer = optimizer_of(self)
        trains = any(parameter.requires_grad for chunk in self.chunks for parameter in chunk.parameters())
        seen = max((layer.history.num_seen for layer in self._layers), default=0)
        # Stages may be frozen, and ranks may have other numbers of micro-batches.
        of_ranks = of_all_ranks((trains, optimizer is not None, seen, num_micro_batches))
        trains, has_optimizer, self._num_done, num_micro_batches = map(max, zip(*of_ranks, strict=True))
        if not trains:
            self._is_frozen = True
            return
        if not has_optimizer:
            raise ConfigurationError(
                f"--moe-strategy {self.name}: got a training pass of a model whose parameters no "
                "optimizer of Megatron has, wanted one of get_megatron_optimizer(); build it before"
            )
        if optimizer is None:  # All that this rank has is frozen.
            optimizer = SimpleNamespace(chained_optimizers=[], config=SimpleNamespace())
        self.host = self.host.with_sources(optimizer.config)
        check_equal(planning_facts(self))
        if self.session is not None:
            self.session.check_model(*self.host.sources)
            report_installation(self)
            self.driver = IterationDriver(self, optimizer, num_micro_batches)
        if self.settings.record_dir is not None or self.host.has_boards:
            self._begin_records(self.settings.record_dir)

    def _begin_records(self, record_dir: Path | None) -> None:
        if self.session is None:
            self._stock = stock_runtime(self.chunks)
        if record_dir is not None:
            check_layers(self.chunks)
        refusal: str | None = None
        try:
            if record_dir is not None and dist.get_rank() == 0:
                record_dir = describe_run(record_dir, self)
            self.recorder = RunRecorder(record_dir, self.name, self.host)
        except ConfigurationError as error:
            refusal = str(error)
        # Only rank 0 writes files, so only it finds that it cannot.
        if (refusal := of_all_ranks(refusal)[0]) is not None:
            raise ConfigurationError(refusal)
        if self.driver is not None and self.driver.balance is not None:
            self.driver.balance.record_dir = record_dir


def _root_of(ddp: torch.nn.Module) -> torch.nn.Module | None:
    """The smallest module that contains all MoE layers of a chunk, outside of lists of layers."""
    paths = [name.replace(".", "/") for name, layer in ddp.named_modules() if isinstance(layer, BaseMoELayer)]
    if not paths:
        return None
    common = commonpath(paths).split("/")
    if "layers" in common:
        common = common[: common.index("layers")]
    return ddp.get_submodule(".".join(common))
