"""Measures what ``--moe-shared-expert-overlap`` saves on links of a given rate, on the testbed's nodes.

Every rank runs a stack of MoE layers with a shared expert, forward and backward, under balanced routing.
Messages are real and links are shaped. Compute is paced (``benchmarks/testbed/pacing.py``): a shared expert's
half and the experts sleep for given times, and twice as long in the backward pass. With and without the flag,
passes take turns. It needs what the testbed needs::

    unshare --net --mount --pid --fork --kill-child python -m benchmarks.shared_expert_overlap
"""

import argparse
import logging
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.testbed.nodes.links import Nodes, parse_rate
from benchmarks.testbed.nodes.processes import run_on_nodes
from benchmarks.testbed.pacing import Timeline, paced
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime

HIDDEN, EXPERTS, TOP_K = 512, 16, 2


def main() -> None:
    """Build the nodes, measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="nodes with one rank each")
    parser.add_argument("--rate", default="400mbit", help="rate of each node's link")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each rank")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--half-ms", type=float, default=30, help="forward time of half a shared expert")
    parser.add_argument("--experts-ms", type=float, default=40, help="forward time of the routed experts")
    parser.add_argument("--strategies", default="ep,fssdp")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--loopback", action="store_true", help="without shaped links, to try the program")
    args = parser.parse_args()
    nodes = Nodes(args.nodes, parse_rate(args.rate))
    if not args.loopback:
        nodes.build()
    cpu_runtime.install()
    import megatron.core.parallel_state  # noqa: F401  Ranks are forked, so that they need not import it.

    passes_s = 6 * args.half_ms / 1e3 * args.layers
    print(f"the shared experts compute for {passes_s:.3f} s in the passes of {args.layers} layers")
    for strategy in args.strategies.split(","):
        seconds_R = run_on_nodes(measure, nodes, 1, strategy, args, namespaces=not args.loopback)
        slowest = [[max(pair) for pair in zip(*[rank[i] for rank in seconds_R], strict=True)] for i in (0, 1)]
        saved = statistics.quantiles([a - b for a, b in zip(*slowest, strict=True)], n=4)
        medians = [statistics.median(seconds) for seconds in slowest]
        print(
            f"{strategy}: without {medians[0]:.3f} s, with {medians[1]:.3f} s, saved {saved[1]:.3f} s "
            f"(quartiles {saved[0]:.3f} to {saved[2]:.3f})"
        )


def measure(strategy: str, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of each pass on this rank, without and with the overlap."""
    from megatron_fssdp.testing.parallel_state import megatron_parallel_state

    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with megatron_parallel_state(ep=dist.get_world_size()):
        stacks = [_stack(strategy, overlaps, args) for overlaps in (False, True)]
        seconds: tuple[list[float], list[float]] = ([], [])
        hidden = torch.randn(args.tokens, 1, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
        for repetition in range(-2, args.repetitions):  # the first two fill the histories of loads
            for found, stack in zip(seconds, stacks, strict=True):
                dist.barrier()
                begin_s = time.perf_counter()
                _pass(stack, hidden)
                if repetition >= 0:
                    found.append(time.perf_counter() - begin_s)
    return seconds


def _pass(stack: list[Any], hidden: torch.Tensor) -> None:
    hidden = hidden.clone().requires_grad_()
    for layer in stack:
        hidden = hidden + layer(hidden)[0]
    hidden.sum().backward()
    for layer in stack:
        layer.zero_grad(set_to_none=True)


def _stack(strategy: str, overlaps: bool, args: argparse.Namespace) -> list[Any]:
    """MoE layers whose shared experts and routed experts are paced."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_fssdp

    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        ffn_hidden_size=8,
        moe_ffn_hidden_size=8,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none",
        moe_router_force_load_balancing=True,
        moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=8,
        moe_shared_expert_overlap=overlaps,
        expert_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
    )
    if strategy == "none":
        spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    else:
        settings = {"slots": 2, "overlap_degree": 2} if strategy == "fssdp" else {}
        spec = megatron_fssdp.get_moe_module_spec(
            use_te=False, num_experts=EXPERTS, strategy=strategy, settings=settings
        )
    layers = []
    for number in range(args.layers):
        layer = spec(config=config, pg_collection=None)
        layer.set_layer_number(number + 1)
        for linear in (layer.shared_experts.linear_fc1, layer.shared_experts.linear_fc2):
            linear.forward = partial(_paced_call, linear.forward, args.half_ms / 1e3)
        if strategy == "none":
            layer.experts.forward = partial(_paced_call, layer.experts.forward, args.experts_ms / 1e3)
        else:
            layer._compute = partial(_paced_call, layer._compute, args.experts_ms / 1e3)
        layers.append(layer)
    return layers


def _paced_call(function: Any, seconds: float, *arguments: Any) -> Any:
    """Call a function, and take at least a given time; twice as long in the backward pass."""
    found = function(*arguments)
    output, *rest = found if isinstance(found, tuple) else (found,)
    output = paced(output, seconds, Timeline(), "compute")
    return (output, *rest) if isinstance(found, tuple) else output


if __name__ == "__main__":
    main()
