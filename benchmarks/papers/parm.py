"""Quantities of Parm's tables and text. A capacity factor makes loads even, so no result depends on a spread.

Table V: the paper states only the names of the models, N_MP = N_ESP = 4 and the number of experts. Assumed
are the published sizes of BERT-Base and of the smallest GPT-2, which differ only in their vocabularies; 8
sequences of 512 tokens on a GPU; experts in place of every feed-forward layer; k = 1, f = 1.2.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.papers.claims import NEAR, claims, stated
from benchmarks.papers.parm_layers import ALL_PAIRS, COLUMNS, PAIRS, LayerSeconds, cell_of, seconds_of
from benchmarks.papers.parm_testbeds import AS_TAKEN, Assumptions, Testbed
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.tensor_schedules import ScheduledLayer

N_MP = N_ESP = 4
LAYERS, HIDDEN, FFN, LENGTH = 12, 768, 3072, 512
TOKENS = 8 * LENGTH
CAPACITY_FACTOR = 1.2
VOCABULARY = {"BERT-Base": 30522, "GPT-2": 50257}


def num_layers(sigma: float, columns: Sequence[str] = tuple(COLUMNS)) -> float:
    """Number of layers of Table III."""
    return sum(len(cell_of(column, pair)) for column in columns for pair in ALL_PAIRS)


def communication_share(sigma: float, **assumptions: object) -> list[float]:
    """Smallest and largest share of communication in the baseline's layers on 32 GPUs (Fig. 1)."""
    taken = Assumptions(**assumptions)  # type: ignore[arg-type]
    shares = [
        layer.baseline.communication_share for pair in ALL_PAIRS for layer in cell_of("T-B 32", pair, taken)
    ]
    return [min(shares), max(shares)]


def all_speedups(sigma: float) -> list[float]:
    """Smallest and largest speed-up of Parm over all layers."""
    speedups = [
        layer.speedup("parm") for column in COLUMNS for pair in ALL_PAIRS for layer in cell_of(column, pair)
    ]
    return [min(speedups), max(speedups)]


def cell(
    sigma: float, schedule: str, n_mp: int, n_esp: int, column: str, assumptions: Assumptions = AS_TAKEN
) -> float:
    """One cell of Table IV: the mean of its layers' speed-ups."""
    return float(np.mean([layer.speedup(schedule) for layer in cell_of(column, (n_mp, n_esp), assumptions)]))


def num_near(sigma: float, **assumptions: object) -> float:
    """Number of cells of Table IV that come near the paper's, under other assumptions."""
    taken = Assumptions(**assumptions)  # type: ignore[arg-type]
    cells = [claim for claim in claims() if (claim.paper, claim.quantity) == ("parm", "cell")]
    return sum(abs(cell(sigma, **row.settings, assumptions=taken) / row.low - 1) <= NEAR for row in cells)


def of_figure_7() -> list[float]:
    """Speed-ups of the layers of Fig. 7."""
    return [layer.speedup("parm") for layer in cell_of("T-B 32", (4, 4))]


def at_least_4(sigma: float) -> float:
    """Share of the layers of Fig. 7 that are at least 4 times as fast."""
    return float(np.mean([speedup >= 4 for speedup in of_figure_7()]))


def figure_7(sigma: float, which: str) -> float:
    """Smallest, mean or largest speed-up of the layers of Fig. 7."""
    layers = of_figure_7()
    return {"smallest": min(layers), "mean": float(np.mean(layers)), "largest": max(layers)}[which]


def _of_testbed(testbed: str) -> list[LayerSeconds]:
    columns = [column for column in COLUMNS if column.startswith(testbed)]
    return [layer for column in columns for pair in PAIRS for layer in cell_of(column, pair)]


def over_worse(sigma: float, testbed: str) -> float:
    """Mean speed-up of Parm over the slower of S1 and S2, over all layers of a testbed."""
    layers = _of_testbed(testbed)
    return float(np.mean([max(layer.s1.total_s, layer.s2.total_s) / layer.parm.total_s for layer in layers]))


def saa(sigma: float, testbed: str) -> float:
    """Mean speed-up of S2 over S2 without overlap of gather and all-to-all, over all layers of a testbed."""
    return float(np.mean([layer.s2_in_turn.total_s / layer.s2.total_s for layer in _of_testbed(testbed)]))


def moe_s(column: str, schedule: str) -> float:
    """Simulated seconds of an iteration in the MoE layers of a model of Table V."""
    testbed = Testbed(*COLUMNS[column])
    layer = ScheduledLayer(
        num_tokens=TOKENS,
        hidden_size=HIDDEN,
        num_rows=AS_TAKEN.top_k * CAPACITY_FACTOR * TOKENS,
        n_mp=N_MP,
        n_esp=N_ESP,
        n_ep=testbed.num_devices // N_ESP,
        element_bytes=AS_TAKEN.element_bytes,
    )
    seconds: float = getattr(seconds_of(layer, FFN, testbed), schedule).total_s
    return LAYERS * seconds


def published_outside_ms(model: str, column: str) -> float:
    """Milliseconds outside MoE layers that follow from Tables IV and V.

    If the MoE layers have the mean speed-up s of Table IV, the times of Table V are t + s·x and t + x. Then t
    is the time outside, and x Parm's time in MoE layers.
    """
    slow, fast = (
        stated("parm", "iteration_ms", model=model, column=column, schedule=schedule)
        for schedule in ("baseline", "parm")
    )
    speed_up = stated("parm", "cell", schedule="parm", n_mp=N_MP, n_esp=N_ESP, column=column)
    return fast - (slow - fast) / (speed_up - 1)


def iteration_ms(sigma: float, model: str, column: str, schedule: str) -> float:
    """Milliseconds of an iteration (Table V).

    The MoE layers are simulated. Everything else takes the time that the paper's numbers give for the *other*
    model, so that no row of Table V enters its own simulation.
    """
    other_model = next(name for name in VOCABULARY if name != model)
    return 1e3 * moe_s(column, schedule) + published_outside_ms(other_model, column)


def model_speedup(sigma: float, model: str, column: str) -> float:
    """Speed-up of a whole iteration (Table V)."""
    slow, fast = (iteration_ms(sigma, model, column, schedule) for schedule in ("baseline", "parm"))
    return slow / fast


def outside_ms(sigma: float, model: str, column: str) -> float:
    """Milliseconds that can be simulated outside the MoE layers: attention, logits and all-reduces.

    Optimizer, embeddings, norms and the reduction of gradients are missing.
    """
    testbed = Testbed(*COLUMNS[column])
    tokens_bytes = TOKENS * HIDDEN * AS_TAKEN.element_bytes
    all_reduce_s = testbed.costs(N_MP, N_ESP)["all_reduce", "mp"].time_s(tokens_bytes)
    attention = 8.0 * HIDDEN**2 + 4.0 * LENGTH * HIDDEN
    logits = 2.0 * HIDDEN * VOCABULARY[model]
    forward = TOKENS * (LAYERS * attention + logits) / N_MP
    dense_s = (1 + BACKWARD_PER_FORWARD) * forward / testbed.flops_per_s
    return 1e3 * (LAYERS * 2 * all_reduce_s + dense_s)
