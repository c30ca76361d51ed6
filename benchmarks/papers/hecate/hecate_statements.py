"""Statements of Hecate's text (Fig. 9 to 15).

**In the paper, the fastest baseline is slower than EP.** Over EP, Hecate is 1.40 to 1.58 times as fast on 16
GPUs, and over the best baseline 1.645 times (Fig. 9). So the best baseline has 0.85 to 0.96 of EP's speed
there, 0.65 to 0.87 on 32 GPUs, and all baselines together have 0.43 to 0.58 on cluster B (Fig. 10). What
slows them down is not in the text. Simulated baselines only pay for the traffic and the imbalance that
follow from their placements. SmartMoE then gains 6 to 8 % over EP, but FasterMoE and FlexMoE gain 54 to 104
%. These two make the simulated best baseline too good. FlexMoE in the paper is the authors' own
re-implementation (§5.1), and the memory that it had is not stated. Moves of experts are not the cause: they
take 0.1 to 0.8 % of a simulated iteration. The direction is the paper's: Hecate is faster than the best
baseline in all cases. The rows that begin with "one change" show other assumptions, one at a time.

**Over EP we are above the paper, because MoE layers take a larger part of the simulated iteration.** The
layers of GPT-MoE-S are 11.87 times as fast in the paper (Fig. 11), and its iteration at most 1.70 times
(Fig. 10). Both can only be true if MoE layers take at most (1 − 1/1.70) / (1 − 1/11.87) = 45 % of EP's
iteration. Here they take 80 to 92 %. What the paper does in the other 55 % is not in the text. Even loads
without replicas would give 1.44 to 1.81 in the simulation. Hecate exceeds that because its replicas also keep
tokens in their nodes.

**Longer compute outside the MoE layers would explain five differences at once**: the three ranges of Fig. 9
and 10, and both statements of §5.2 on how the speed-up changes with the GPUs and the cluster. If it took 6.7
times as long as assumed, MoE layers would take 45 % of EP's iteration where Fig. 10 and 11 say so. If 10
experts were replicated then, as in Fig. 13, all three ranges would come within 15 %, and both statements
would hold in all cases. This is not assumed, because the 45 % follow from the numbers that it would explain.
There is also a contradiction that the text does not solve: 6.7 times as many seconds hide the transfers of
all experts at the nominal bandwidth (§4.2), and not of 10. So either the bandwidth that the authors measured
for t was about a seventh of the nominal one, or memory allowed no more replicas. Neither is published.

**The drift of the loads is not the cause.** The paper has one number about it: placements that are renewed
every 10 iterations in place of 25 make SmartMoE's other iterations 2.9 % faster (§1). Here the difference is
below 1 % for any drift from 0.02 to 0.4 (standard deviation of the change of a popularity's logarithm in one
iteration; 0.02 is assumed). Exchanges gain only 6 to 8 % over EP here in all.

**Assumptions.** The paper does not state batch sizes: comparisons have the largest one that did not run out
of memory in any system (§5.1). Only Hecate-RM can run 6 sequences of GPT-MoE-S (§5.4), so 4 sequences of
2,048 tokens are assumed, and 16 of BERT's 512. GPUs have the throughput that Megatron-LM's authors published
for V100 (39 TFLOP/s) and A100 (137). Compute outside the MoE layers takes 1.45 times as long as this gives,
which follows from the 5.73 of Fig. 13. Where the text names no cluster (Fig. 13 to 15), it is cluster B here.
Fig. 13 is taken to be about GPT-MoE-S: re-materialization keeps the replicas of one layer instead of those of
all layers, and the 90.2 % that this saves are near 11/12, which is 12 layers, and not near 23/24.

"Hecate" is ``fssdp`` with the paper's planner (Alg. 1) and with the limits of §4.2. The paper tuned the
baselines' intervals and reserved memory by hand and does not state the values. Here, SmartMoE and FlexMoE
move experts every 25 iterations, whatever that costs, and FlexMoE has room for 4 replicas of a layer, which
follows from its memory in §5.3. Few iterations are simulated, with a move every 6, and the seconds of a move
are spread over the interval.

**Four nodes limit what balance can gain here.** A node's NICs limit an all-to-all, and with four nodes the
busiest node has at most 4 times the traffic that it has under even loads. The paper's slowdown of 5.18 (§1)
is above 4. Its all-to-alls, 12.3 times as fast (Fig. 12), would also need replicas that keep two thirds of
the tokens in their nodes. So its all-to-alls were probably limited by single GPUs, or padded to the most
loaded expert. The text does not say which.

**Fig. 15 and Fig. 10 cannot both be times of whole iterations of GPT-MoE-S**: sharding alone is 1.34 to 1.42
times as fast as EP, and both components are 3.32 times as fast as sharding alone. Together that is at least
4.4, where Fig. 10 has at most 1.70. The text does not say what Fig. 15 measures.
"""

from benchmarks.papers.hecate.hecate_best_baseline import OF_BASELINES, OVER_BEST_BASELINE, one_number
from benchmarks.papers.hecate.hecate_claims import CLAIMS as CLAIMS
from benchmarks.papers.hecate.hecate_runs import BASELINES, FLEXMOE_SLOTS, HECATE, REMATERIALIZED
from benchmarks.papers.hecate.hecate_trends import IN_FIGURE_13, TIMES_LONGER, with_share_and_degree
from benchmarks.papers.hecate.hecate_values import (
    IMPLIED_SHARE,
    all_to_all,
    both_over,
    collectives,
    even_loads,
    intervals,
    intervals_of_smartmoe,
    largest,
    largest_over_ep,
    layers,
    mean_of_layers,
    memory,
    of_models,
    over_baselines,
    parameters,
    rematerialized_over_baselines,
    saved_by_rematerialization,
    share_of_moe,
    slowdown,
    slower_with_rematerialization,
    with_share_of_moe,
)
from benchmarks.papers.setting import OURS, Relation

OF_FOUR_NODES = "balance gives at most 4 where the NICs of four nodes are the limit (see above)"
OF_SKEW = f"{OF_FOUR_NODES}; what the paper's layers differ in, besides their loads, is not published"
OF_SHARE = (
    "MoE layers take 80 to 92 % of EP's iteration here; Fig. 10 and 11 together allow at most 45 % (see "
    "above). With 45 % the row comes within 15 %"
)
OF_HIDDEN = "gathers are hidden better here than in the paper; what its collectives cost is not published"
OF_COMPONENTS = "not end-to-end in the paper (see above); which times Fig. 15 compares is not stated"
OF_SMARTMOE = "exchanges gain little here, because they only balance the NICs of four nodes"


def _with_share(place: str, low: float, high: float, cluster: str, devices: int) -> Relation:
    """Hecate over EP, if EP's MoE layers took the share of its iteration that the paper implies."""
    what = f"Hecate over EP ({place}), if EP's MoE layers took 45 % of its iteration"
    return Relation(OURS, what, low, high, with_share_of_moe(cluster, devices))


def _with_share_and_degree(place: str, low: float, high: float, cluster: str, devices: int) -> Relation:
    """Hecate over EP, simulated with that share and the number of replicated experts of Fig. 13."""
    what = (
        f"Hecate over EP ({place}), simulated with {TIMES_LONGER} times as long compute outside the MoE "
        f"layers and {IN_FIGURE_13} replicated experts"
    )
    return Relation(OURS, what, low, high, with_share_and_degree(cluster, devices))


RELATIONS = (
    one_number("§1", "EP over EP with even loads, cluster A, at most", 5.18, slowdown, OF_FOUR_NODES),
    Relation(
        "Fig. 9, §5.2",
        "Hecate over EP, cluster A, 16 GPUs",
        1.40,
        1.58,
        of_models("hecate-a", 16),
        explained=OF_SHARE,
        beside=even_loads("hecate-a", 16),
    ),
    Relation(
        "Fig. 9, §5.2",
        "Hecate over EP, cluster A, 32 GPUs",
        1.34,
        1.78,
        of_models("hecate-a", 32),
        explained=OF_SHARE,
        beside=even_loads("hecate-a", 32),
    ),
    Relation(
        "Fig. 10, §5.2",
        "Hecate over EP, cluster B, 32 GPUs",
        1.26,
        1.70,
        of_models("hecate-b", 32),
        explained=OF_SHARE,
        beside=even_loads("hecate-b", 32),
    ),
    Relation(
        OURS,
        "share of EP's iteration in MoE layers, GPT-MoE-S, cluster B; at most, from Fig. 10 and 11",
        IMPLIED_SHARE,
        IMPLIED_SHARE,
        share_of_moe,
    ),
    _with_share("Fig. 9, cluster A, 16 GPUs", 1.40, 1.58, "hecate-a", 16),
    _with_share("Fig. 9, cluster A, 32 GPUs", 1.34, 1.78, "hecate-a", 32),
    _with_share("Fig. 10, cluster B, 32 GPUs", 1.26, 1.70, "hecate-b", 32),
    _with_share_and_degree("Fig. 9, cluster A, 16 GPUs", 1.40, 1.58, "hecate-a", 16),
    _with_share_and_degree("Fig. 9, cluster A, 32 GPUs", 1.34, 1.78, "hecate-a", 32),
    _with_share_and_degree("Fig. 10, cluster B, 32 GPUs", 1.26, 1.70, "hecate-b", 32),
    Relation(
        OURS,
        "our planner over EP, cluster A, 32 GPUs (Fig. 9)",
        1.34,
        1.78,
        of_models("hecate-a", 32, HECATE.having(planner="balanced")),
    ),
    *OVER_BEST_BASELINE,
    one_number(
        "Fig. 10, §5.2", "geo-mean over the baselines, cluster B", 2.945, over_baselines, OF_BASELINES
    ),
    one_number("Abstract", "over a baseline, at most", 3.54, largest, OF_BASELINES),
    one_number(
        "§1",
        "Hecate-RM, at most; the text does not say over what, here over EP",
        1.52,
        largest_over_ep(REMATERIALIZED),
        "the setting is not published",
    ),
    one_number(
        "§1",
        "FlexMoE with 4 times EP's memory over EP, at most",
        2.65,
        largest_over_ep(BASELINES["FlexMoE"].having(slots=6)),
        "neither the model nor the cluster is published",
    ),
    one_number(
        "§1",
        "SmartMoE every 10 iterations over every 25, MoE layers, with moves",
        1.102,
        intervals_of_smartmoe(with_moves=True),
        OF_SMARTMOE,
    ),
    one_number(
        "§1",
        "SmartMoE every 10 iterations over every 25, MoE layers, without moves",
        0.971,
        intervals_of_smartmoe(with_moves=False),
        OF_SMARTMOE,
    ),
    Relation(
        "Fig. 11, §5.3", "layer by layer over EP, GPT-MoE-S, cluster B", 2.8, 18.8, layers, explained=OF_SKEW
    ),
    one_number("Fig. 11, §5.3", "geo-mean of the layers", 11.87, mean_of_layers, OF_SKEW),
    one_number("Fig. 12, §5.3", "all-to-all of EP over Hecate's, BERT-MoE-Deep", 12.3, all_to_all, OF_SKEW),
    one_number(
        "Fig. 12, §5.3", "Hecate-RM over the baselines", 1.4, rematerialized_over_baselines, OF_BASELINES
    ),
    one_number(
        "Fig. 12, §5.3",
        "seconds of the sparse collectives, Hecate-RM over Hecate",
        3.6,
        collectives,
        "all seconds count here; the paper compares what is on the critical path, and here nearly nothing is",
    ),
    Relation("Fig. 13, §5.3", "parameters over EP's", 5.73, 5.73, parameters(HECATE), is_input=True),
    one_number("Fig. 13, §5.3", "memory over EP's", 1.64, memory(HECATE)),
    one_number("Fig. 13, §5.3", "memory over EP's, re-materialized", 1.116, memory(REMATERIALIZED)),
    one_number(
        "Fig. 13, §5.3", "replicas' parameters saved by re-materialization", 0.902, saved_by_rematerialization
    ),
    Relation(
        "Fig. 13, §5.3",
        f"memory of FlexMoE over Hecate's, with room for {FLEXMOE_SLOTS} replicas",
        1.83,
        1.83,
        memory(BASELINES["FlexMoE"], HECATE),
        is_input=True,
    ),
    Relation(
        "Fig. 14, §5.4",
        "seconds with re-materialization over without",
        1.075,
        1.169,
        slower_with_rematerialization,
        explained=OF_HIDDEN,
    ),
    Relation(
        "Fig. 15b, §5.4",
        "sharding every 10 to 100 iterations over EP",
        1.34,
        1.42,
        intervals,
        explained=OF_COMPONENTS,
    ),
    one_number(
        "Fig. 15a, §5.4",
        "both over sharding alone",
        3.32,
        both_over(slots=0, overlap_degree=0),
        OF_COMPONENTS,
    ),
    one_number(
        "Fig. 15a, §5.4",
        "both over materialization alone",
        1.27,
        both_over(reshard_interval=0),
        OF_COMPONENTS,
    ),
)

NOT_REPRODUCED = {
    "Fig. 1, 2, 4 to 8": "drawings of the method",
    "Fig. 3": "expert loads of the paper's trainings, without numbers",
    "Fig. 12": "bars without numbers; the statements of the text have rows",
    "Fig. 14": (
        "which systems run out of memory at which batch: that depends on activations, and the text says that "
        "Fig. 13 leaves them out"
    ),
}
"""Figures and statements without a row, and why."""
