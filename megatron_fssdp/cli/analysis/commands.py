"""The options of ``report``, ``compare``, ``simulate`` and ``roofline``."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_fssdp.cli.strategy_names import SHIPPED_NAMES, complete_cluster, complete_strategy

ClusterName = Annotated[
    str,
    typer.Option(
        help="YAML of a cluster, or a name that `megatron-fssdp configs` lists.",
        autocompletion=complete_cluster,
    ),
]
ClusterValues = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A value of the cluster. Repeatable.")
]
StrategySettings = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="A setting for all strategies that have this key. Repeatable."),
]
RankingCluster = Annotated[
    str | None,
    typer.Option(
        help="Cluster to rank strategies on: YAML file, or a name that `megatron-fssdp configs` lists."
    ),
]
RankedStrategies = Annotated[
    str,
    typer.Option(
        help=f"Strategies to rank, separated by commas, of {SHIPPED_NAMES}. Default: all that place experts.",
        autocompletion=complete_strategy,
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of tables.")]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def report_command(
    run: Annotated[Path, typer.Argument(help="Output folder of a run.", metavar="RUN_DIR")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write. Default: report.html in the run's folder.")
    ] = None,
    cluster: RankingCluster = None,
    strategies: RankedStrategies = "",
    as_json: AsJson = False,
) -> None:
    """Write an HTML page with the losses, loads, times, placements and memory of a run."""
    from rich.console import Console

    from megatron_fssdp.cli.analysis.report_command import write_report

    write_report(
        [run],
        Console(markup=False),
        out=out,
        cluster=cluster,
        strategies=_names(strategies),
        as_json=as_json,
    )


def compare_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Output folders of two or more runs.", metavar="RUN_DIR...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write. Default: comparison.html in the first run's folder."),
    ] = None,
    loads_only: Annotated[
        bool,
        typer.Option(
            "--loads-only", help="Compare runs without their losses. Needed if they train different things."
        ),
    ] = False,
    cluster: RankingCluster = None,
    strategies: RankedStrategies = "",
    as_json: AsJson = False,
) -> None:
    """Compare the losses, device loads, speed and moved bytes of runs in a table and an HTML page."""
    from rich.console import Console

    from megatron_fssdp.cli.analysis.report_command import write_report
    from megatron_fssdp.config.errors import ConfigurationError

    if len(runs) < 2:
        raise ConfigurationError(
            "compare: got one run, wanted two or more; `megatron-fssdp report RUN_DIR` shows a single one"
        )
    write_report(
        runs,
        Console(markup=False),
        out=out,
        cluster=cluster,
        strategies=_names(strategies),
        loads_only=loads_only,
        as_json=as_json,
    )


def simulate_command(
    loads: Annotated[
        str,
        typer.Option(help="Folder of a recorded run, its loads.npy, or the name of a workload (W0 to W7)."),
    ],
    cluster: ClusterName,
    out: Annotated[Path, typer.Option(help="Folder to write the results to.")],
    model: Annotated[
        list[Path] | None,
        typer.Option(
            help="YAML of the run. Repeatable for parts of a run. Default: the recorded run's own settings.",
            metavar="RUN.yaml",
        ),
    ] = None,
    strategies: Annotated[
        str,
        typer.Option(
            help=f"Strategies to simulate, separated by commas, of {SHIPPED_NAMES}.",
            autocompletion=complete_strategy,
        ),
    ] = "ep,fssdp",
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Number of iterations to generate (default 20) or to use of a record (default all).",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the run. Repeatable."),
    ] = None,
    cluster_set: ClusterValues = None,
    moe_strategy_set: StrategySettings = None,
    break_even: Annotated[
        bool, typer.Option(help="Find the batch size and bandwidth at which each strategy starts to pay.")
    ] = True,
    plots: Annotated[bool, typer.Option(help="Write the HTML page.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of generated loads.")] = 0,
) -> None:
    """Predict which strategy is fastest on a cluster, from recorded or generated loads."""
    from rich.console import Console

    from megatron_fssdp.cli.analysis.simulate_command import SimulateRequest, run_simulation
    from megatron_fssdp.cli.analysis.simulation_inputs import recorded_settings

    request = SimulateRequest(
        loads=loads,
        cluster=cluster,
        models=model or recorded_settings(loads),
        strategies=_names(strategies),
        out=out,
        iterations=iterations,
        overrides=settings or (),
        cluster_overrides=cluster_set or (),
        strategy_overrides=moe_strategy_set or (),
        with_break_even=break_even,
        with_plots=plots,
        seed=seed,
    )
    run_simulation(request, Console(markup=False))


def roofline_command(
    run: Annotated[Path, typer.Argument(help="Output folder of a recorded run.", metavar="RUN_DIR")],
    cluster: ClusterName,
    strategies: Annotated[
        str,
        typer.Option(help="Strategies to draw, separated by commas. Default: ep and the run's strategy."),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder to write the results to. Default: the run's folder.")
    ] = None,
    cluster_set: ClusterValues = None,
    moe_strategy_set: StrategySettings = None,
) -> None:
    """Draw how close a run's MoE layers come to the limits of compute and communication (FasterMoE, §3.3)."""
    from rich.console import Console

    from megatron_fssdp.cli.analysis.roofline_command import run_roofline

    run_roofline(
        run,
        cluster,
        Console(markup=False),
        strategies=_names(strategies),
        out=out,
        cluster_overrides=cluster_set or (),
        strategy_overrides=moe_strategy_set or (),
    )
