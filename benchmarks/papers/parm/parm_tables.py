"""Parm's Tables IV and V: the published numbers, and the simulated ones under several assumptions."""

import numpy as np

from benchmarks.papers.parm.parm_layers import ALL_PAIRS, COLUMNS, cell_of
from benchmarks.papers.parm.parm_models import MODELS, N_ESP, N_MP, moe_s
from benchmarks.papers.parm.parm_testbeds import AS_TAKEN, Assumptions

TABLE_IV = {  # N_MP and N_ESP: speed-ups in the order of COLUMNS
    "s1": {
        (2, 2): (2.10, 2.62, 2.46, 2.72),
        (2, 4): (2.24, 3.37, 2.85, 2.85),
        (4, 2): (3.72, 4.18, 4.12, 3.92),
        (4, 4): (4.19, 5.77, 5.08, 4.57),
    },
    "s2": {
        (2, 2): (1.99, 2.42, 2.20, 2.57),
        (2, 4): (2.41, 3.05, 2.44, 2.75),
        (4, 2): (3.21, 3.58, 3.81, 4.10),
        (4, 4): (4.12, 5.38, 4.82, 4.91),
    },
    "parm": {
        (2, 2): (2.10, 2.62, 2.46, 2.57),
        (2, 4): (2.41, 3.37, 2.85, 2.85),
        (4, 2): (3.70, 4.18, 4.12, 4.06),
        (4, 4): (4.20, 5.77, 5.08, 4.91),
    },
}
NAMES = {"s1": "S1", "s2": "S2", "parm": "Parm"}
TABLE_V = {  # base model, column: milliseconds of DeepSpeed-MoE and of Parm, speed-up
    ("BERT-Base", "T-A"): (1733, 567, 3.06),
    ("BERT-Base", "T-B 32"): (1920, 645, 2.98),
    ("GPT-2", "T-A"): (1790, 581, 3.08),
    ("GPT-2", "T-B 32"): (2187, 695, 3.15),
}
OTHERWISE = {
    "as simulated": AS_TAKEN,
    "with half of the fp32 peak": Assumptions(share_of_peak=0.5),
    "with fp16 and half of the tensor cores' peak": Assumptions(share_of_peak=0.5, element_bytes=2),
    "if the published fit is of N_MP = 2": Assumptions(ranks_of_fit=2),
    "if all collectives have the same start-up": Assumptions(startups="equal"),
    "with k = 2": Assumptions(top_k=2),
    "with all 162 layers a cell": Assumptions(layers="all"),
    "with the 81 layers of the smaller half": Assumptions(layers="smaller half"),
    "if H and M do not grow with N_ESP": Assumptions(layers="unscaled"),
    "if a byte takes equally long in all collectives of T-A": Assumptions(slowdown_of_all_to_all=1.0),
}


def speedup(name: str, pair: tuple[int, int], column: str, assumptions: Assumptions = AS_TAKEN) -> float:
    """Return one cell of Table IV: the mean of its layers' speed-ups."""
    return float(np.mean([layer.speedup(name) for layer in cell_of(column, pair, assumptions)]))


def ratios_of_table_iv(
    assumptions: Assumptions = AS_TAKEN,
) -> dict[tuple[str, tuple[int, int], str], float]:
    """Return simulated divided by published speed-up of each cell, by schedule, pair and column."""
    return {
        (name, pair, column): speedup(name, pair, column, assumptions) / value
        for name, rows in TABLE_IV.items()
        for pair, values in rows.items()
        for column, value in zip(COLUMNS, values, strict=True)
    }


def iteration_ms(model: str, column: str, name: str) -> float:
    """Return the milliseconds of an iteration.

    The MoE layers are simulated. Everything else takes the time that the paper's numbers give for the *other*
    model, which has the same layers, so that no row of Table V enters its own simulation.

    Args:
        model: Name of the model.
        column: Column of Table IV, which names testbed and number of GPUs.
        name: ``baseline`` or ``parm``.
    """
    other = next(name for name in MODELS if name != model)
    return 1e3 * moe_s(MODELS[model], column, name) + published_outside_ms(other, column)


def published_outside_ms(model: str, column: str) -> float:
    """Return the milliseconds outside MoE layers that follow from Tables IV and V.

    If the MoE layers of the models have the mean speed-up s of Table IV, N_MP = N_ESP = 4, the times of
    Table V are t + s·x and t + x. Then t is the time outside, and x Parm's time in MoE layers.
    """
    slow, fast, _ = TABLE_V[model, column]
    speed_up = TABLE_IV["parm"][N_MP, N_ESP][list(COLUMNS).index(column)]
    return fast - (slow - fast) / (speed_up - 1)


def communication_shares(assumptions: Assumptions = AS_TAKEN) -> list[float]:
    """Return the baseline's share of communication on 32 GPUs, for all layers (Fig. 1)."""
    return [
        layer.baseline.communication_share
        for pair in ALL_PAIRS
        for layer in cell_of("T-B 32", pair, assumptions)
    ]
