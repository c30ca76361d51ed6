"""Stand-ins for the kernels of DeepEP and HybridEP, with the interface that Megatron's flex dispatcher uses.

Every rank gathers the tokens of all ranks, which must have equally many. Autograd makes the backward passes.
"""

import os

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import token_dispatcher


def install_fused_dispatch():
    """Let Megatron's flex dispatcher use the stand-ins in this process."""
    token_dispatcher.fused_dispatch, token_dispatcher.fused_combine = _deepep_dispatch, _deepep_combine
    token_dispatcher.hybrid_ep_dispatch = _hybridep_dispatch
    token_dispatcher.hybrid_ep_combine = _hybridep_combine
    token_dispatcher.set_deepep_num_sms = lambda number: None


def _gather(x, group):
    return mappings.gather_from_sequence_parallel_region(x, group=group)


def _scatter_sums(rows, token, num_tokens, group):
    sums = rows.new_zeros(num_tokens, rows.shape[1]).index_add(0, token, rows)
    return mappings.reduce_scatter_to_sequence_parallel_region(sums, group=group)


def _deepep_dispatch(x, indices, probs, num_experts, group, **_):
    """One row for each token and rank, and the local experts of each row."""
    per_rank = num_experts // group.size()
    local = _gather(indices, group) - group.rank() * per_rank
    is_here = (local >= 0) & (local < per_rank) & (_gather(indices, group) >= 0)
    (token,) = is_here.any(dim=1).nonzero(as_tuple=True)
    counts = torch.bincount(local[is_here], minlength=per_rank)
    rows, probs = _gather(x, group), torch.where(is_here, _gather(probs, group), 0)
    handle = (token, len(rows))
    return rows[token], torch.where(is_here, local, -1)[token], probs[token], counts, handle


def _deepep_combine(x, group, handle, **_):
    return _scatter_sums(x, *handle, group), None


def _hybridep_dispatch(*, x, routing_map, probs, group, num_local_experts, **_):
    """One row for each token and expert, sorted by expert."""
    domain = int(os.environ.get("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", group.size()))
    assert num_local_experts * min(domain, group.size()) % 4 == 0, "probabilities travel in units of 16 bytes"
    here = slice(group.rank() * num_local_experts, (group.rank() + 1) * num_local_experts)
    chosen = _gather(routing_map, group)[:, here].T
    expert, token = chosen.nonzero(as_tuple=True)
    rows, probs = _gather(x, group), _gather(probs, group)[:, here]
    handle = (token, len(rows), group)
    return rows[token], probs[token, expert], None, chosen.sum(dim=1), handle


def _hybridep_combine(*, x, handle, **_):
    return _scatter_sums(x, *handle)
