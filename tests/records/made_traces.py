"""Router traces and tokens per expert as Megatron writes them, of random routing."""

import json
from typing import Any

import numpy as np

TOP_K, TOKENS, EXPERTS = 2, 16, 4
LINE = {"stage": "pre_dispatch", "block": "decoder", "num_tokens": TOKENS, "topk": TOP_K}


def write_traces(folder, layers_of_stages, num_devices, passes=(3, 3), seed=0):
    """Write a trace of ranks in stages with so many layers, of iterations with so many passes.

    Return the counts, ``[I, L, D, E]``.
    """
    rng = np.random.default_rng(seed)
    counts = np.zeros((len(passes), sum(layers_of_stages), num_devices, EXPERTS), np.int64)
    before = 0
    for stage, num_layers in enumerate(layers_of_stages):
        for device in range(num_devices):
            rank, lines = stage * num_devices + device, list[dict[str, Any]]()
            places = ((i, n) for i, num in enumerate(passes) for _ in range(num) for n in range(num_layers))
            for step, layer in places:
                chosen = np.argsort(rng.random((TOKENS, EXPERTS)) * [1, 2, 3, 4], axis=1)[:, :TOP_K]
                counts[step, before + layer, device] += np.bincount(chosen.ravel(), minlength=EXPERTS)
                place = {"step": step, "layer": layer, "rank": rank}
                lines.append({**LINE, **place, "top_indices": chosen.tolist()})
            write_lines(folder / f"router_trace_rank{rank}.jsonl", lines)
        before += num_layers
    return counts


def write_tokens_per_expert(folder, layers_of_stages, group, copies):
    """Write tokens per expert of stages with copies of expert-parallel groups; return ``[I, L, E]``."""
    rng, own = np.random.default_rng(0), EXPERTS // group
    counts = np.zeros((2, sum(layers_of_stages), EXPERTS), np.int64)
    before = rank = 0
    for num_layers in layers_of_stages:
        for device in range(group * copies):
            lines = []
            for i, layer in ((i, layer) for i in range(2) for layer in range(num_layers)):
                tpe = rng.integers(0, 99, (3, own))
                first = device % group * own
                counts[i, before + layer, first : first + own] += tpe.sum(axis=0)
                lines.append({"iter": 10 * (i + 1), "block": "decoder", "layer": layer, "tpe": tpe.tolist()})
            write_lines(folder / "tokens_per_expert" / f"rank{rank}.jsonl", lines)
            rank += 1
        before += num_layers
    return counts


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
