"""Command line `trimtab` for users: plan, validate, serve and measure.

It needs no GPU; only the commands of the panel "In a cluster" need one, and only engine commands need the engine.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from trimtab_operator.cli import (
    cluster_commands,
    engine_commands,
    migrate_command,
    pod_commands,
    replay_command,
)
from trimtab_operator.cli.board_command import board
from trimtab_operator.cli.doctor_command import doctor
from trimtab_operator.cli.history_command import history
from trimtab_operator.cli.model_argument import facts_of
from trimtab_operator.cli.operator_command import render, validate
from trimtab_operator.cli.plan_report import LayoutPlan, heading, legend, reasons, rejected_table, rows_table, to_json
from trimtab_operator.cli.report_command import report
from trimtab_operator.cli.run_command import catalogue, install, run
from trimtab_operator.cli.shared import HELP, exit_with_error, parse_gpu, version_callback
from trimtab_operator.cli.simulate_command import simulate
from trimtab_operator.cli.top_command import top
from trimtab_operator.cli.why_command import why
from trimtab_operator.layout.check import longer_than_positions, no_such_arithmetic
from trimtab_operator.layout.cost import NETWORK_GIGABITS, Hardware
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import GPUS, Gpu
from trimtab_operator.layout.memory_fit import Envelope, kv_dtype_bytes
from trimtab_operator.layout.ranking import Cluster, Load, rank_layouts

EXIT_NO_LAYOUT = 1
RESOURCES, PLANNING, CLUSTER = "Resources, without a cluster", "Planning", "In a cluster"  # panels of the help
PIPED_WIDTH = 160  # columns of the table without a terminal
NARROW = 130  # columns below which reasons are printed below the table

ABOUT = "Plan, validate, serve and measure language models. The operator in a cluster is trimtab-operator."
EXAMPLES = """Examples:

trimtab serve MODEL --device cpu --device-memory-bytes 4Gi

trimtab plan MODEL --gpu H100

trimtab validate -f deployment.yaml

trimtab bench serve --model MODEL

trimtab status NAME -n NAMESPACE

trimtab top -n NAMESPACE

trimtab board

trimtab why NAME -n NAMESPACE

trimtab doctor

trimtab replay --prometheus http://localhost:9090 --from 2h -f deployment.yaml"""

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, help=ABOUT, epilog=EXAMPLES, context_settings=HELP
)
for engine_command in (
    engine_commands.serve,
    engine_commands.bench,
    engine_commands.autotune,
    engine_commands.fetch,
    engine_commands.inspect,
):
    app.command(
        cls=engine_commands.EngineCommand,
        context_settings=engine_commands.PASS_THROUGH_SETTINGS,
        add_help_option=False,
        rich_help_panel="On this machine (trimtab-engine)",
    )(engine_command)
app.command(rich_help_panel=RESOURCES)(validate)
app.command(rich_help_panel=RESOURCES)(render)
app.command("migrate", help=migrate_command.ABOUT, epilog=migrate_command.EXAMPLES, rich_help_panel=RESOURCES)(
    migrate_command.migrate
)
app.command(rich_help_panel=PLANNING)(simulate)
app.command("replay", help=replay_command.ABOUT, epilog=replay_command.EXAMPLES, rich_help_panel=PLANNING)(
    replay_command.replay_recording
)
app.command(rich_help_panel=PLANNING)(catalogue)
app.command(rich_help_panel=CLUSTER)(install)
app.command(rich_help_panel=CLUSTER)(run)
app.command(rich_help_panel=CLUSTER)(cluster_commands.status)
app.command(rich_help_panel=CLUSTER)(top)
app.command(rich_help_panel=CLUSTER)(board)
app.command(rich_help_panel=CLUSTER)(why)
app.command(rich_help_panel=CLUSTER)(history)
app.command(rich_help_panel=CLUSTER)(pod_commands.logs)
app.command(rich_help_panel=CLUSTER)(pod_commands.chat)
app.command("set", rich_help_panel=CLUSTER)(cluster_commands.set_fields)
app.command(rich_help_panel=CLUSTER)(cluster_commands.export)
app.command(rich_help_panel=CLUSTER)(cluster_commands.pause)
app.command(rich_help_panel=CLUSTER)(cluster_commands.resume)
app.command(rich_help_panel=CLUSTER)(pod_commands.drain)
app.command(rich_help_panel=CLUSTER)(doctor)
app.command(rich_help_panel=CLUSTER)(report)


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


class Objective(StrEnum):
    THROUGHPUT = "throughput"
    LATENCY = "latency"


class KvDtype(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8 = "fp8"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"


class Quantization(StrEnum):
    FP8 = "fp8"


@app.callback(help=ABOUT, epilog=EXAMPLES)
def commands(
    shows_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=version_callback("trimtab"), is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Handle the options before every command."""


@app.command(rich_help_panel=PLANNING)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Model: a folder with a config.json, a config.json, or the output of "
            "`trimtab-engine inspect MODEL -o json` (a file, or - for standard input)."
        ),
    ],
    gpu: Annotated[str, typer.Option(help=f"Kind of GPU: {', '.join(gpu.name for gpu in GPUS)}.")],
    gpus_per_node: Annotated[int, typer.Option(min=1, max=64, help="GPUs of one node.")] = 8,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Nodes.")] = 1,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum length of prompt plus output, in tokens. Default: the model's.")
    ] = None,
    gpu_memory_utilization: Annotated[
        str, typer.Option(help="Share of each GPU's memory that the engine may use.")
    ] = "0.9",
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Maximum running requests per engine. Default: the engine's.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token budget of one step. Default: the engine's.")
    ] = None,
    kv_cache_dtype: Annotated[
        KvDtype, typer.Option(help="Data type of the KV cache. auto: the data type of the model.")
    ] = KvDtype.AUTO,
    quantization: Annotated[
        Quantization | None, typer.Option(help="Quantize the weights when loading. Default: as stored.")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompt tokens of an average request. Default: 1024, or the model's maximum length if shorter."
        ),
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of an average request.")] = 256,
    network_gigabits: Annotated[
        float, typer.Option(min=0.1, help="Network between nodes: Gbit/s per GPU and direction.")
    ] = NETWORK_GIGABITS,
    objective: Annotated[
        Objective,
        typer.Option(
            help="Ranking criterion: tokens per second of all GPUs, or time per output token of a single request."
        ),
    ] = Objective.THROUGHPUT,
    limit: Annotated[int, typer.Option(min=1, help="Number of layouts to show.")] = 10,
    show_all: Annotated[bool, typer.Option("--all", help="Show all layouts, including rejected ones.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format: table or json.")] = Output.TABLE,
) -> None:
    """Rank the parallel layouts of a model, each with its KV cache, estimated speed and reason.

    Exit code 1 if no layout works, 2 if the input is unreadable or invalid.
    """
    device, facts = parse_gpu(gpu), _facts(model)
    _reject_invalid_flags(
        ("--max-model-len", longer_than_positions(max_model_len, facts)),
        ("--prompt-tokens", longer_than_positions(prompt_tokens, facts)),
        ("--kv-cache-dtype", no_such_arithmetic(kv_cache_dtype.value, device)),
    )
    envelope = _envelope(facts, device, gpu_memory_utilization)
    envelope = replace(
        envelope,
        max_model_len=max_model_len or envelope.max_model_len,
        max_num_seqs=max_num_seqs or envelope.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or envelope.max_num_batched_tokens,
        kv_dtype_bytes=kv_dtype_bytes(kv_cache_dtype.value, facts),
        quantization=None if quantization is None else quantization.value,
    )
    cluster = Cluster(
        hardware=Hardware(gpu=device, network_gigabits=network_gigabits), gpus_per_node=gpus_per_node, nodes=nodes
    )
    load = Load(output_tokens=output_tokens)
    load = replace(load, prompt_tokens=prompt_tokens or min(load.prompt_tokens, facts.max_model_len))
    ranking = rank_layouts(facts, cluster, envelope, load=load, objective=objective.value)
    planned = LayoutPlan(
        facts=facts, cluster=cluster, envelope=envelope, load=load, objective=objective.value, ranking=ranking
    )
    most = max(1, len(ranking.rows)) if show_all else limit
    if output is Output.JSON:
        typer.echo(json.dumps(to_json(planned, limit=most, with_rejected=show_all), indent=2))
    else:
        _print(planned, limit=most, with_rejected=show_all)
    if not ranking.rows:
        raise typer.Exit(EXIT_NO_LAYOUT)


def _print(planned: LayoutPlan, *, limit: int, with_rejected: bool) -> None:
    width = _width()
    narrow = width < NARROW
    console = Console(highlight=False, width=width)
    console.print(heading(planned), soft_wrap=True, markup=False)
    rows, refused = planned.ranking.rows, planned.ranking.refused
    if rows:
        console.print(rows_table(planned, limit=limit, narrow=narrow))
        for reason in reasons(planned, limit=limit) if narrow else ():
            console.print(reason, markup=False)
        if len(rows) > limit:
            console.print(f"{len(rows) - limit} more with --all.", markup=False)
        console.print(legend(planned), soft_wrap=True, markup=False)
    else:
        console.print("No layout of this model works on these GPUs.", markup=False)
    if refused and (with_rejected or not rows):
        console.print(rejected_table(planned))


def _width() -> int:
    """Return the width of the table: COLUMNS if it is set, else the terminal's."""
    return (
        shutil.get_terminal_size((PIPED_WIDTH, 0)).columns
        if sys.stdout.isatty() or "COLUMNS" in os.environ
        else PIPED_WIDTH
    )


def _envelope(facts: ModelFacts, gpu: Gpu, utilization: str) -> Envelope:
    try:
        share = float(utilization)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1 or not all(character in "0123456789." for character in utilization):
        exit_with_error(
            f"--gpu-memory-utilization: {utilization!r} is not a fraction; use a decimal above 0, at most 1"
        )
    return replace(Envelope.default(facts, gpu), gpu_memory_utilization=utilization)


def _facts(model: str) -> ModelFacts:
    try:
        return facts_of(model)
    except ValueError as error:
        exit_with_error(str(error))


def _reject_invalid_flags(*flags: tuple[str, str | None]) -> None:
    """Exit if `trimtab-operator validate` would reject a flag; each flag has its error message or None."""
    wrong = [f"{flag}: {message}" for flag, message in flags if message is not None]
    if wrong:
        exit_with_error("\n".join(wrong))


def main() -> Any:
    """Run the console entry point."""
    return app()


if __name__ == "__main__":
    main()
