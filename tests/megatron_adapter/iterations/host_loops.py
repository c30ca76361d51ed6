"""The training loops of hosts, reduced to their calls of megatron-core, on a GPT-MoE with hot experts."""

from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel as Ddp
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer

import megatron_fssdp
from megatron_fssdp.megatron_adapter.wrapping import wrap
from megatron_fssdp.runtime.layers.pass_binder import PassBinder

from ..expert_gradients import owned_experts
from ..layer.small_config import moe_config

MICRO_BATCHES, BATCH, LENGTH, VOCABULARY, EXPERTS = 2, 2, 16, 64, 8


@dataclass
class Trained:
    """What one rank found; gradients are norms by layer, expert and matrix, home at the owner."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[tuple[str, int, int], float]] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)  # most of a layer's plan, by iteration
    forward_only: list[float] = field(default_factory=list)  # losses of log-probabilities
    num_known: int = 0  # iterations whose loads are known of every layer, at the end
    moved: list[bool] = field(default_factory=list)  # whether experts are elsewhere, by iteration
    micro_batches: int = 0  # of an iteration, by the measured costs


class Host:
    """A model with DDP and optimizer, and what every loop does with them."""

    has_gloo_groups = True  # in Megatron's parallel state

    def __init__(self, **options):
        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        self.config = config()
        self.model = wrapped(self.config, **options)
        self.gpt, ddp_config = self.model.module, self.model.ddp_config
        adam = {"optimizer": "adam", "lr": 2e-2, "overlap_param_gather": ddp_config.overlap_param_gather}
        adam["use_distributed_optimizer"] = ddp_config.use_distributed_optimizer
        given = finished(OptimizerConfig, **adam), [self.model]
        self.optimizer = get_megatron_optimizer(*given, use_gloo_process_groups=self.has_gloo_groups)
        self._hooks()
        if ddp_config.overlap_param_gather:  # as Megatron-LM does until the first step is over
            self.model.disable_forward_pre_hook(param_sync=False)
            self.config.param_sync_func = None
        self.at(0)
        self.reference = {}
        self.results = Trained()

    def at(self, iteration):
        """Begin the data of an iteration, on which only the rank has an influence."""
        self._generator = torch.Generator().manual_seed(100 + dist.get_rank() + 1000 * iteration)

    def _hooks(self):
        config, ddp = self.config, self.model.ddp_config
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if ddp.overlap_grad_reduce:
            config.no_sync_func, config.grad_sync_func = self.model.no_sync, self.model.start_grad_sync

    def batch(self):
        tokens = torch.randint(VOCABULARY // 4, (BATCH, LENGTH + 1), generator=self._generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def forward(self, model=None):
        tokens, labels = self.batch()
        positions = torch.arange(LENGTH).expand(BATCH, -1)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        loss = (model or self.model)(tokens, positions, mask, labels=labels)
        return loss.mean()

    def passes(self, number=MICRO_BATCHES, *, model=None, forward_only=False):
        """Passes by Megatron's schedule; the sum of the losses."""

        def step(data, chunk):
            return self.forward(chunk), lambda loss: (loss, {"loss": loss.detach()})

        sizes = {"num_microbatches": number, "seq_length": LENGTH, "micro_batch_size": BATCH}
        given = {"forward_step_func": step, "data_iterator": None, "model": [model or self.model]}
        losses = get_forward_backward_func()(**given, **sizes, forward_only=forward_only)
        return sum(float(output["loss"]) for output in losses)

    def log_probabilities(self, model=None):
        self.model.eval()
        with torch.no_grad():
            self.results.forward_only.append(self.passes(2, model=model, forward_only=True))
        self.model.train()

    @contextmanager
    def reference_weights(self):
        """Give the model the weights of a reference, by their names, and its own ones afterwards."""
        megatron_fssdp.restore_owners(self.model)
        overlaps = bool(self.model.remove_forward_pre_hook_handles)
        if overlaps:
            self.model.disable_forward_pre_hook()
        own = {name: parameter.detach().clone() for name, parameter in self.gpt.named_parameters()}
        self.reference = self.reference or {name: 0.9 * weight for name, weight in own.items()}
        self._write(self.reference)
        yield
        self._write(own)
        if overlaps:
            self.model.enable_forward_pre_hook()

    @torch.no_grad()
    def _write(self, weights):
        for name, parameter in self.gpt.named_parameters():
            parameter.copy_(weights[name])

    def reset(self):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def finalize(self):
        finalize_model_grads([self.model])

    def step(self, loss):
        self.results.gradients.append(self.gradients())
        _, norm, _ = self.optimizer.step()
        self.results.norms.append(float(norm))
        self.results.losses.append(loss)

    def _layers(self):
        return (module for module in self.gpt.modules() if isinstance(module, MoELayer))

    def gradients(self):
        return {
            (*expert, place): float(parameter.main_grad.norm())
            for expert, parameters in owned_experts([self.gpt])
            for place, parameter in enumerate(parameters)
        }

    def overlaps_gather(self):
        """After the first step, parameters are gathered in forward passes."""
        if self.model.ddp_config.overlap_param_gather:
            self.model.enable_forward_pre_hook()
            self.config.param_sync_func = self.model.start_param_sync


def finished(kind, **options):
    """A config of a class whose objects are finished by a call, as Megatron-Bridge's are."""
    late = type(kind.__name__, (kind,), {"__post_init__": lambda self: None})(**options)
    kind.__post_init__(late)
    return late


def wrapped(config, **options):
    options = {"use_distributed_optimizer": True, "bucket_size": 4000, **options}
    return Ddp(config, finished(DistributedDataParallelConfig, **options), build(config))


def config():
    sizes = {"num_layers": 2, "num_attention_heads": 2, "moe_router_topk": 2, "init_method_std": 0.1}
    return moe_config(2, 16, EXPERTS, **sizes, hidden_dropout=0.0, attention_dropout=0.0)


def build(config):
    """A GPT whose first experts are hot, and whose experts differ between ranks."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    gpt = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    for layer in (module for module in gpt.modules() if isinstance(module, MoELayer)):
        with torch.no_grad():
            layer.router.weight[:2] += 0.1
            for parameter in layer.experts.parameters():
                parameter.mul_(1 + 0.5 * layer.ep_group.rank())
    return gpt


def swift(host, iteration):
    host.reset()
    host.step(host.passes())


def verl(host, iteration):
    """Log-probabilities, mini-batches of several sizes, gradients set to zero again after the step."""
    host.log_probabilities()
    for number in (1 + iteration % 3, 2):
        host.optimizer.zero_grad()
        host.model.zero_grad_buffer()
        host.step(host.passes(number))
        host.optimizer.zero_grad()
        host.model.zero_grad_buffer()


def slime(host, iteration):
    """Log-probabilities of a reference, whose weights are written over the model's for a while."""
    with host.reference_weights():
        host.log_probabilities()
    host.reset()
    loss = host.passes()
    assert not host.optimizer.prepare_grads()
    host.optimizer.get_grad_norm()
    host.step(loss)
    host.reset()


def nemo(host, iteration):
    """Several calls of the schedule, none of which finalizes; gradients are scaled before their reduction."""
    host.reset()
    config, loss = host.config, 0.0
    kept = config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func
    config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func = None, nullcontext, None
    for _ in range(2 + iteration % 2):
        with host.model.no_sync():
            loss += host.passes(1)
    config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func = kept
    host.model.scale_gradients(0.5)
    if host.model.ddp_config.overlap_grad_reduce:
        host.model.start_grad_sync()
    host.finalize()
    host.step(loss)


def by_hand(host, iteration):
    """No schedule; buffers are reset one by one; a forward pass without gradients in the middle."""
    for buffer in (*host.model.buffers, *host.model.expert_parallel_buffers):
        buffer.reset()
    for group in (*host.model.bucket_groups, *host.model.expert_parallel_bucket_groups):
        group.reset()
    host.optimizer.zero_grad()
    total = 0.0
    numbers = range(2 + iteration % 2)
    for number in numbers:
        with nullcontext() if number == numbers[-1] else host.model.no_sync():
            loss = host.forward(host.gpt if number else None)
            loss.backward()
        total += float(loss)
        with torch.inference_mode() if number else torch.no_grad():
            host.results.forward_only.append(float(host.forward()))
    host.finalize()
    host.step(total)


def abandoning(host, iteration):
    """Iterations that an error ends, or whose step is skipped, or whose gradients are set to zero twice."""
    host.reset()
    if iteration % 3 == 1:
        host.passes()  # The step is skipped.
        host.reset()
    elif iteration % 3 == 2:
        forward, calls = host.forward, [0]

        def failing(model=None):
            calls[0] += 1
            if calls[0] == 2:
                raise ArithmeticError("the second micro-batch")
            return forward(model)

        host.forward = failing
        with suppress(ArithmeticError):
            host.passes()
        host.forward = forward
        host.reset()
    host.reset()
    host.step(host.passes())


def offloading(host, iteration):
    """Between the phases, the memory of parameters and gradients is given back, as verl does."""
    host.reset()
    host.step(host.passes())
    for buffer in (*host.model.buffers, *host.model.expert_parallel_buffers):
        held = [tensor for tensor in (buffer.param_data, buffer.grad_data) if tensor is not None]
        kept = [tensor.clone() for tensor in held]
        for tensor in held:
            tensor.untyped_storage().resize_(0)
        for tensor, values in zip(held, kept, strict=True):
            tensor.untyped_storage().resize_(values.nbytes)
            tensor.copy_(values)


LOOPS = {loop.__name__: loop for loop in (swift, verl, slime, nemo, by_hand, abandoning, offloading)}


def trained(strategy, loop, num_iterations=3, **options):
    """Train a new model on this rank."""
    made = list[int]()

    def counting(make, self, plan, *given, **more):
        made.append(plan.placement.num_replicas)
        return make(self, plan, *given, **more)

    for method in ("for_iteration", "for_micro_batch"):
        wrap(PassBinder, method, counting)
    attachment = megatron_fssdp.attach(*strategy)
    host = Host(**options)
    host.model.train()
    for iteration in range(num_iterations):
        made.clear()
        loop(host, iteration)
        host.results.replicas.append(max(made, default=0))
        if not iteration:
            host.overlaps_gather()
        for session in (model.session for model in attachment.models if strategy[0] != "none"):
            host.results.num_known = min(len(layer.history) for layer in session.runtime.layers)
            host.results.moved.append(not session.slots.owners.is_even)
            if (profile := session.runtime.layers[0].local.context.profile) is not None:
                host.results.micro_batches = profile.num_micro_batches
    return host.results


def train_under(rank, world_size, loops, strategies):
    """Train in one process in loops with options, each under one strategy after another, ``none`` first.

    Every training has a model of its own.
    """
    return {
        loop: [trained(strategy, LOOPS[loop], **options) for strategy in (("none", {}), *strategies)]
        for loop, options in loops.items()
    }


def assert_equal(ranks, names, groups=((0, 1),)):
    """Runs have the losses and norms of the first one of their rank, and in these groups its gradients."""
    for stock, *others in ranks:
        for name, run in zip(names, others, strict=True):
            for quantity in ("losses", "norms", "forward_only"):
                wanted = pytest.approx(getattr(stock, quantity), rel=1e-5)
                assert getattr(run, quantity) == wanted, f"{name}: {quantity}"
    for number, name in enumerate(names, 1):
        for group in groups:
            assert_equal_gradients(*([ranks[rank][which] for rank in group] for which in (number, 0)), name)


def assert_equal_gradients(ours, stock, name):
    """Each expert's gradient is at its owner, wherever that is."""
    of_ranks = (zip(*(run.gradients for run in ranks), strict=True) for ranks in (ours, stock))
    for got, wanted in zip(*of_ranks, strict=True):
        experts, theirs = ({key: part[key] for part in parts for key in part} for parts in (got, wanted))
        assert experts.keys() == theirs.keys(), name
        assert experts == pytest.approx(theirs, rel=2e-5, abs=1e-7), name
