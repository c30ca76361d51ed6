"""The main statements of each paper, in plain words, for ``docs/papers.md``."""

IN_SHORT = {
    "parm": {
        ("§I", "Parm over DeepSpeed-MoE, all layers"): ("Parm over DeepSpeed-MoE, single MoE layers", ""),
        ("Fig. 1", "baseline's communication share, H and M times N_ESP"): (
            "share of communication in DeepSpeed-MoE's layers",
            "",
        ),
        ("Table V, T-B 32", "Parm over DeepSpeed-MoE, BERT-Base"): (
            "Parm over DeepSpeed-MoE, whole model, 32 GPUs",
            "",
        ),
        ("Table V, T-A", "Parm over DeepSpeed-MoE, BERT-Base"): (
            "Parm over DeepSpeed-MoE, whole model, 8 GPUs",
            "start-ups are long there, and the tokens of these models are not published",
        ),
    },
    "fastermoe": {
        ("Fig. 10, §5.4", "over ZeRO stage 3, johnny, at most"): ("FasterMoE over ZeRO stage 3, johnny", ""),
        ("Fig. 10, §5.4", "over ZeRO stage 3, trevor, at most"): (
            "FasterMoE over ZeRO stage 3, trevor",
            "open: tokens and loads of the 64 experts are not published",
        ),
        ("Fig. 13, §5.5", "smart schedule, mean of all models"): ("smart schedule over none", ""),
        ("Fig. 13, §5.5", "shadowing, johnny, at most"): ("shadowing over none, johnny", ""),
        ("Table 3", "iteration of FastMoE over FasterMoE's"): (
            "FasterMoE over FastMoE, whole iteration",
            "the authors' system shadows more experts than pay; with the formula of their scripts it is 1.38",
        ),
        ("Fig. 13, §5.5", "both, johnny, at most"): (
            "shadowing and smart schedule over none, johnny",
            "the BERT models have the skew of one layer of another model here",
        ),
    },
    "pro-prophet": {
        ("Fig. 10a, b", "Pro-Prophet over FasterMoE, HPWNV, K = 1"): (
            "Pro-Prophet over FasterMoE, top-1",
            "",
        ),
        ("Fig. 10c, d", "Pro-Prophet over FasterMoE, HPWNV, K = 2"): (
            "Pro-Prophet over FasterMoE, top-2",
            "",
        ),
        ("Fig. 10a, b", "Pro-Prophet over DeepSpeed-MoE, HPWNV, K = 1"): (
            "Pro-Prophet over DeepSpeed-MoE, top-1",
            "DeepSpeed-MoE is simulated as plain expert parallelism; in 10 of 18 cells of Tables IV and V "
            "the paper's speed-up is above that of perfectly even loads",
        ),
        ("Fig. 10c, d", "Pro-Prophet over DeepSpeed-MoE, HPWNV, K = 2"): (
            "Pro-Prophet over DeepSpeed-MoE, top-2",
            "as for top-1",
        ),
    },
    "hecate": {
        ("Fig. 9, §5.2", "Hecate over EP, cluster A, 32 GPUs"): (
            "Hecate over EP, 32 V100",
            "MoE layers take 86 to 92 % of EP's iteration here; the paper's numbers allow at most 45 %",
        ),
        ("Fig. 9, §5.2", "geo-mean over the best baseline, 32 GPUs"): (
            "Hecate over the best baseline, 32 V100",
            "the simulated FasterMoE and FlexMoE are faster than EP, the paper's are not; its text does "
            "not say why",
        ),
        ("Fig. 11, §5.3", "geo-mean of the layers"): (
            "one MoE layer of Hecate over EP's",
            "balance gives at most 4 where the NICs of four nodes are the limit",
        ),
        ("Fig. 13, §5.3", "memory over EP's"): ("memory of Hecate's experts over EP's", ""),
        ("Fig. 15b, §5.4", "sharding every 10 to 100 iterations over EP"): (
            "Hecate's sharding alone over EP",
            "",
        ),
    },
}
"""By paper, and by a row's place and words: the statement in plain words, and why it is missed, if it is."""
