"""What all comparisons of trainings share: tables of layouts, and trainings under two strategies."""

from dataclasses import dataclass

from megatron_fssdp.records.metrics import read_metrics

from ...training_run import GPT, HALF, assert_close, flags, rows, train

ADAPTIVE = "fssdp slots=2 overlap_degree=3 reshard_interval=2"


@dataclass(frozen=True)
class Layout:
    """What is trained how: ``settings`` are the strategy's keys, or the strategy's name and its keys.

    Experts must move to other owners if the layout ``moves``, and have replicas if it ``replicates``.
    """

    num_ranks: int
    ep: int
    arguments: str
    settings: str
    moves: bool = True
    replicates: bool = True
    num_iterations: int = 6
    reshard_interval: int = 2

    @property
    def is_half(self):
        """Whether the parts of a replicated expert's gradient are rounded one by one, in half precision."""
        return "--bf16" in self.arguments or "--fp16" in self.arguments


def layouts(table, **names):
    """Read layouts by name from a table, see :func:`rows`.

    A row has ``name | ranks expert-parallel-size | arguments | settings | further attributes``. The last two
    may be left out.
    """
    by_name = {}
    for name, cells in rows(table, ADAPTIVE=ADAPTIVE, **names).items():
        sizes, arguments, settings, further, *_ = [*cells, "", ""]
        num_ranks, ep = map(int, sizes.split())
        options = {key: int(value) for key, value in (cell.split("=") for cell in further.split())}
        by_name[name] = Layout(num_ranks, ep, arguments, settings, **options)
    return by_name


def trained(layout, strategy, data, *, model=GPT, before=None):
    """Train a layout under a strategy with its settings; see :func:`train`."""
    arguments = f"{layout.arguments} --train-iters {layout.num_iterations} {flags(strategy)}"
    arguments = f"--expert-model-parallel-size {layout.ep} {arguments}"
    return train(layout.num_ranks, arguments, data, model=model, before=before)


def against_stock(layout, data, folder, *, bound=1e-05, before=None, moves=False, model=GPT):
    """Train under ``none`` and under the strategy of ``layout.settings``, which keeps records, and compare.

    ``bound`` is that of losses in fp32. Under ``fssdp``, there must be replicas exactly if the layout says
    so. Experts must have moved if ``moves``. Returns the run of stock Megatron.
    """
    options = {"before": before, "model": model}
    stock = trained(layout, "none", data, **options)
    run = trained(layout, f"{layout.settings} record_dir={folder}", data, **options)
    assert len(stock.losses) == layout.num_iterations
    assert_close(run, stock, *(HALF if layout.is_half else (bound, 1e-4)))
    if "fssdp" in layout.settings:
        replicas = replicas_of(read_metrics(folder))
        assert any(replicas) == layout.replicates
        # The first iteration is planned by its own counts, but not by the paper's planner.
        assert replicas[0] == 0 or "hecate" not in layout.settings
    assert any("re-sharded" in message for message in run.messages) or not moves
    # Tokens are sent as pairs until costs are measured, and once from then on.
    told = [text for text in run.messages if "exchange by price" in text]
    assert bool(told) == ("by_price" in layout.settings)
    assert all("exchange by price, iteration 3: layers" in text for text in told)
    return stock


def replicas_of(metrics):
    return [sum(layer.num_replicas for layer in entry.layers) for entry in metrics]
