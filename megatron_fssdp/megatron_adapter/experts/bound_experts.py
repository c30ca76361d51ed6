"""Lets Megatron's own expert module compute with the weights of the experts that are present on a device.

Megatron builds a module for the experts that a rank owns at the start. Under a strategy, a rank computes
other experts too, in any number, and their weights are tensors and not Parameters. :class:`BoundExperts`
therefore keeps a *body* for every number of experts: a shallow copy of Megatron's module, whose linear
layers have the present weights for the length of one call::

    Megatron's module        Parameters of E/D experts    config, groups, hooks, kernels
    body for G experts       weights of one call          the same objects

Megatron's module never computes. It keeps the Parameters, their names in checkpoints and their places in
DDP's buckets.

Shape letters: R rows that a rank receives, M model dimension, G experts present on a device,
E experts, D devices.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights

_LINEARS = ("linear_fc1", "linear_fc2")


class BoundExperts:
    """The forward pass of Megatron's expert module for any present experts.

    Args:
        experts: Megatron's expert module: ``SequentialMLP``, or ``TEGroupedMLP`` with one weight tensor for
            each expert.
        may_fuse: Whether the runtime can provide ``main_grad`` of the weights in the backward pass.

    Attributes:
        fuses_gradients: Whether the backward pass adds the gradients of weights to their ``main_grad`` in the
            matrix product itself, as Transformer Engine's layers can do. It saves the memory and the time of
            a separate gradient, and adds without rounding to half precision.
    """

    def __init__(self, experts: Any, *, may_fuse: bool = False) -> None:
        self._experts = experts
        self._bodies: dict[int, Any] = {}
        mlps = getattr(experts, "local_experts", [experts])
        # Megatron's own linear layers take main_grad in the forward pass, when it does not exist yet.
        self.fuses_gradients = may_fuse and all(
            getattr(linear, "fuse_wgrad_accumulation", False) for mlp in mlps for linear in _linears(mlp)
        )

    def compute(
        self,
        rows: torch.Tensor,
        probs: torch.Tensor,
        rows_per_expert: Sequence[int],
        present: Sequence[ExpertWeights],
    ) -> torch.Tensor:
        """Compute every present expert on its rows; this is an ``ExpertCompute`` of the runtime.

        The result depends on ``rows`` and ``probs`` also if no expert is present. The autograd graphs of all
        ranks therefore have the same collectives.

        Args:
            rows: Rows sorted by expert, ``[R, M]``.
            probs: Routing probability of each row, ``[R]``.
            rows_per_expert: Number of rows of each present expert, ``[G]``; the sum is R.
            present: Weights of the present experts, ascending by expert.

        Returns:
            Results of the rows, ``[R, M]``.
        """
        if not present:
            return (rows * probs.unsqueeze(-1)).to(rows.dtype)
        body = self._body(len(present))
        counts_G = torch.tensor(rows_per_expert, dtype=torch.long, device="cpu")
        _bind(body, present)
        try:
            # Both modules add the output's bias to the rows, so they return no bias.
            output, _ = body(rows, counts_G, probs)
        finally:
            _unbind(body)
        return output

    def _body(self, num_present: int) -> Any:
        """The body for a number of experts; it follows the module between training and evaluation."""
        if num_present not in self._bodies:
            self._bodies[num_present] = _body_of(self._experts, num_present, fuses=self.fuses_gradients)
        body = self._bodies[num_present]
        if body.training != self._experts.training:
            body.train(self._experts.training)
        return body


def _body_of(experts: Any, num_experts: int, *, fuses: bool) -> Any:
    body = _like(experts)
    body.num_local_experts = num_experts
    if "local_experts" in body._modules:
        # Local experts differ only in their weights.
        mlps = _like(experts.local_experts)
        mlps._modules = {str(i): _like(experts.local_experts[0]) for i in range(num_experts)}
        body._modules["local_experts"] = mlps
        for mlp in mlps:
            _replace_linears(mlp, fuses=fuses)
        return body
    _replace_linears(body, fuses=fuses)
    for linear in _linears(body):
        linear.num_gemms = num_experts
        # Scales and caches of quantized weights belong to one number of experts. Megatron's module never
        # computes, so its own dictionaries are as they were built.
        linear.__dict__.update({name: dict(x) for name, x in vars(linear).items() if type(x) is dict})
        if "bias0" in vars(linear):  # Transformer Engine has an empty tensor for a missing bias.
            linear.__dict__.update({f"bias{i}": linear.bias0 for i in range(num_experts)})
    for name in ("quantization_padding", "quantization_unpadding"):
        if (padding := getattr(experts, name, None)) is not None:
            body._modules[name] = type(padding)(num_experts, align_size=padding.align_size)
    return body


def _replace_linears(module: Any, *, fuses: bool) -> None:
    """Give a copied module linear layers of its own that have no weights."""
    for name in _LINEARS:
        linear = _like(getattr(module, name))
        linear._parameters = {}
        linear.gradient_accumulation_fusion, linear.fuse_wgrad_accumulation = False, fuses
        # A body has other weights in the next call, so nothing may be kept for them.
        linear.disable_parameter_transpose_cache = True
        module._modules[name] = linear


def _linears(module: Any) -> list[Any]:
    return [getattr(module, name) for name in _LINEARS]


def _bind(body: Any, present: Sequence[ExpertWeights]) -> None:
    mlps = getattr(body, "local_experts", None)
    for i, weights in enumerate(present):
        # Grouped linear layers have the weights of all experts, with the expert's index in their names.
        linears, index = (_linears(body), str(i)) if mlps is None else (_linears(mlps[i]), "")
        biases = (weights.fc1_bias, weights.fc2_bias)
        for linear, weight, bias in zip(linears, (weights.fc1, weights.fc2), biases, strict=True):
            linear._parameters[f"weight{index}"] = weight
            if bias is not None or mlps is not None:
                linear._parameters[f"bias{index}"] = bias


def _unbind(body: Any) -> None:
    mlps = getattr(body, "local_experts", None)
    for module in [body] if mlps is None else mlps:
        for linear in _linears(module):
            linear._parameters.clear()


def _like(module: Any) -> Any:
    """A module that shares everything with another one but its tables of Parameters and submodules."""
    like = object.__new__(type(module))
    like.__dict__.update(module.__dict__)
    like.__dict__["_parameters"] = dict(module._parameters)
    like.__dict__["_modules"] = dict(module._modules)
    return like
