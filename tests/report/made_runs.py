"""Run folders with made-up records of every kind, in which all numbers differ."""

import numpy as np

from megatron_fssdp.planning.loads import max_over_mean
from megatron_fssdp.records.loads import LoadsWriter, MicroBatchLoadsWriter
from megatron_fssdp.records.metrics import IterationMetrics, LayerMetrics, MetricsWriter, PassMetrics
from megatron_fssdp.records.placements import PlacementsWriter


def write_made_run(
    folder,
    strategy="fssdp",
    *,
    num_iterations=5,
    num_layers=2,
    num_experts=8,
    num_devices=4,
    num_micro_batches=1,
    seed=0,
    has_parts=True,
    starts=None,
):
    """Write metrics, loads, placements, settings and a log's memory line; return the folder.

    ``starts`` are what each start of the training records, by its first iteration.
    """
    rng = np.random.default_rng(seed)
    owner_E = np.arange(num_experts) * num_devices // num_experts
    owned_ED = owner_E[:, None] == np.arange(num_devices)
    replicates = strategy not in ("ep", "none")
    layers = list(range(1, num_layers + 1))
    skew_LE = rng.dirichlet(np.full(num_experts, 0.4), num_layers)
    metrics = MetricsWriter(folder)
    loads = LoadsWriter(folder, layers)
    placements, micro_batches = PlacementsWriter(folder, layers), MicroBatchLoadsWriter(folder, layers)
    for iteration in range(1, num_iterations + 1):
        skew_LE = 0.9 * skew_LE + 0.1 * rng.dirichlet(np.full(num_experts, 0.4), num_layers)
        counts_LDE = np.stack([rng.multinomial(4096, skew_E, num_devices) for skew_E in skew_LE])
        ep_LD = counts_LDE.sum(axis=1) @ owned_ED
        present_LED = np.repeat(owned_ED[None], num_layers, axis=0)
        tokens_LD = ep_LD
        if replicates:
            hot_L = counts_LDE.sum(axis=1).argmax(axis=1)
            present_LED[np.arange(num_layers), hot_L] = True
            mean_L1 = ep_LD.mean(axis=1, keepdims=True)
            tokens_LD = np.rint(mean_L1 + 0.25 * (ep_LD - mean_L1)).astype(np.int64)
        single = (
            rng.multinomial(counts_DE, np.full(num_micro_batches, 1 / num_micro_batches))
            for counts_DE in counts_LDE
        )
        micro_batches.append(iteration, [np.moveaxis(counts_DEZ, 2, 0) for counts_DEZ in single])
        loads.append(iteration, counts_LDE)
        owned_LED = np.repeat(owned_ED[None], num_layers, axis=0)
        placements.append(iteration, owned_LED, present_LED, ep_LD, tokens_LD)
        replicas_L = (present_LED.sum(axis=(1, 2)) - num_experts).tolist()
        resharded = {"resharded_experts": 3, "reshard_bytes": 300, "reshard_s": 0.2} if iteration == 4 else {}
        of_layers = []
        for i, num in enumerate(replicas_L):
            load = max_over_mean(ep_LD[i]), max_over_mean(tokens_LD[i])
            moved = {"spag_bytes": 1000 * num, "sprs_bytes": 1000 * num, "cross_node_tokens": 7}
            spag = {"spag_s": 0.01 * num, "spag_exposed_s": 0.001 * num}
            sprs = {"sprs_s": 0.01 * num, "sprs_exposed_s": 0.002 * num}
            forward = PassMetrics(0.02 + 0.01 * i, 0.015, 0.02, 0.025, 0.03)
            backward = PassMetrics(0.06, 0.02, 0.04, 0.05, 0.045)
            parts = {"forward": forward, "backward": backward} if has_parts else {}
            of_layers.append(LayerMetrics(layers[i], *load, num, **moved, **spag, **sprs, **parts))
        metrics.append(
            IterationMetrics(
                iteration,
                lm_loss=7.0 * 0.99**iteration + 0.01 * float(rng.random()),
                grad_norm=1.0,
                iteration_s=1.0 + 0.1 * float(rng.random()),
                tokens_per_s=1000.0 + iteration,
                layers=tuple(of_layers),
                **resharded,
                passes_s=0.8,
                rank_peak_bytes=tuple(2**30 + 2**26 * rank for rank in range(num_devices)),
                rank_memory="allocated",
                session=(starts or {}).get(iteration),
            )
        )
    (folder / "log.txt").write_text("[default0]:[fssdp] memory of a rank: experts 3.6 MiB: parameters 1 B\n")
    (folder / "config.yaml").write_text(f"strategy:\n  name: {strategy}\n")
    return folder
