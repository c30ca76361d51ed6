"""A MoE layer without experts, whose seconds are those of its all-to-alls and of the sorting of rows.

Shape letters: T tokens of this rank, M model dim, E experts, K experts of a token.
"""

import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
from megatron_fssdp.planning.cost.cost_model import NUM_ALL_TO_ALLS

_EXPERTS_PER_RANK, _TOP_K = 2, 2


def prepare_exchange(
    num_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    num_near: int,
    *,
    model_dim: int,
    dtype: torch.dtype,
) -> tuple[Callable[[], object], int]:
    """Both passes of Megatron's all-to-all dispatcher with even routing, and bytes that a rank sends in them.

    In each of its all-to-alls of rows, a rank sends about ``num_bytes`` to the ranks of the group but to its
    own and ``num_near`` others. All ranks call it.
    """
    size = group.size()
    num_experts = _EXPERTS_PER_RANK * size
    with warnings.catch_warnings(action="ignore"):  # Megatron's, of a model that nobody trains
        if device.type == "cpu":
            os.environ[cpu_runtime.DEVICE_VARIABLE] = "cpu"  # also on a machine with GPUs
            cpu_runtime.install()
        # Imported here, because the CPU runtime comes first.
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=1,
            hidden_size=model_dim,
            num_attention_heads=1,
            num_moe_experts=num_experts,
            moe_router_topk=_TOP_K,
            expert_model_parallel_size=size,
            moe_token_dispatcher_type="alltoall",
            use_cpu_initialization=True,
            add_bias_linear=False,
            params_dtype=dtype,
        )
    groups = SimpleNamespace(ep=group, tp_ep=group, expt_tp=None)
    first = group.rank() * _EXPERTS_PER_RANK
    own = list(range(first, first + _EXPERTS_PER_RANK))
    dispatcher = MoEAlltoAllTokenDispatcher(_EXPERTS_PER_RANK, own, config, groups)
    # Equally many tokens for every expert: token t has the experts K·t, K·t + 1, …
    sent_bytes_per_turn = size * _TOP_K * model_dim * dtype.itemsize * (size - 1 - num_near) // size
    num_tokens = size * max(1, round(num_bytes / sent_bytes_per_turn))
    expert_TK = torch.arange(num_tokens * _TOP_K, device=device).view(num_tokens, _TOP_K) % num_experts
    routing_TE = torch.zeros(num_tokens, num_experts, dtype=torch.bool, device=device)
    routing_TE.scatter_(1, expert_TK, True)
    hidden = torch.randn(num_tokens, 1, model_dim, device=device).to(dtype).requires_grad_()
    probs = (routing_TE / _TOP_K).requires_grad_()

    def both_passes() -> None:
        rows, row_probs = dispatcher.dispatch_preprocess(hidden, routing_TE, probs)
        rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
        rows, _, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        results = dispatcher.combine_postprocess(rows)
        outputs = (results, row_probs)
        torch.autograd.grad(outputs, (hidden, probs), [torch.ones_like(output) for output in outputs])

    return both_passes, NUM_ALL_TO_ALLS * sent_bytes_per_turn * (num_tokens // size)
