"""One forward pass through a layer without Megatron, from tokens to their results.

The adapter's ``placement_dispatcher.py`` takes the same steps in the phases in which Megatron calls it.

Shape letters: T tokens, M model dimension, E experts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from megatron_fssdp.runtime.exchange.row_exchanges.megatron_exchange import MegatronExchange
from megatron_fssdp.runtime.exchange.smart_schedule import ExpertCompute
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor, MicroBatch

Span = Callable[[str], AbstractContextManager[object]]
"""From the name of a step to the context manager that is entered around the step."""


def _untimed(step: str) -> AbstractContextManager[None]:
    return nullcontext()


def run_layer(
    executor: LayerExecutor,
    hidden: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    compute: ExpertCompute,
    *,
    exchange: MegatronExchange | None = None,
    span: Span = _untimed,
) -> tuple[Tensor, MicroBatch]:
    """Send tokens to their experts, compute, and sum each token's results.

    Args:
        executor: The layer's executor.
        hidden: Hidden states of this rank's tokens, ``[T, M]``.
        probs: Routing probabilities, ``[T, E]``.
        routing_map: Experts that each token selected, bool ``[T, E]``.
        compute: Function that computes the experts on rows sorted by expert.
        exchange: Order of the collectives that carry rows, for this pass only. Default: Megatron's order.
        span: Context manager entered around ``counts and plan``, ``dispatch`` and ``combine``; under the
            smart schedule around ``counts and plan`` and ``dispatch, experts and combine``.

    Returns:
        Sums of each token's results, ``[T, M]``, and the exchange, weights and plan of this pass.
    """
    executor.plan_iteration()
    known = executor.recall()
    exchange = known.exchange if known is not None else exchange or MegatronExchange(executor.groups)
    hidden, probs, routing_map = exchange.gather(hidden, probs, routing_map)
    with span("counts and plan"):
        micro_batch = executor.begin_micro_batch(routing_map, exchange, known)
    record, materialization = micro_batch.exchange, micro_batch.materialization
    smart_schedule = executor.smart_schedule(micro_batch, compute)
    if smart_schedule is not None:
        hidden, experts = materialization.apply(hidden)
        with span("dispatch, experts and combine"):
            rows = smart_schedule.run(*exchange.permute(hidden, probs), experts)
        return materialization.release(exchange.unpermute(rows)), micro_batch
    if not materialization.beside_dispatch:
        hidden, experts = materialization.apply(hidden)
    rows, row_probs = exchange.permute(hidden, probs)
    with span("dispatch"):
        meanwhile = partial(executor.while_rows_travel, micro_batch)
        rows, row_probs = exchange.dispatch(rows, row_probs, meanwhile)
    if materialization.beside_dispatch:
        rows, experts = materialization.apply(rows)
    rows, row_probs = micro_batch.arrivals.sort_by_expert(*exchange.gather_peers(rows, row_probs))
    materialization.await_weights()
    with executor.computing(rows):
        rows = compute(rows, row_probs, record.rows_per_expert, experts)
    rows = materialization.end_use(executor.computed(rows))
    rows = exchange.sum_peers(micro_batch.arrivals.sort_by_source(rows), rows.dtype)
    with span("combine"):
        rows = exchange.combine(rows)
    return materialization.release(exchange.unpermute(rows)), micro_batch
