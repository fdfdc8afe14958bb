"""`trimtab simulate`: a trace of real load against replicas in virtual time, under one policy or several."""

from __future__ import annotations

import json
import math
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from trimtab_operator.cli.shared import EXIT_REFUSED, check_read, check_written
from trimtab_operator.tuner.parameters import Parameter, Value

if TYPE_CHECKING:
    from trimtab_simulator.experiment import Experiment
    from trimtab_simulator.results import Result

EXIT_NOT_WRITTEN = 1
PIPED_WIDTH = 160
TOLD_EVERY_SECONDS = 0.2


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


class RouterName(StrEnum):
    SERVICE = "service"
    LEAST_REQUEST = "least-request"


def simulate(
    trace: Annotated[
        Path, typer.Option(help="A log of requests (Azure, Mooncake), or rates (ServeGen). Plain or gzip.")
    ],
    ttft: Annotated[
        str | None, typer.Option(help="Time to first token: 2s, or 2s+1/8000 to give each prompt token 1/8000 s.")
    ] = None,
    lengths: Annotated[Path | None, typer.Option(help="Lengths for rates: ServeGen's, or another log.")] = None,
    speed: Annotated[float, typer.Option(help="How many seconds of the trace pass in one.")] = 1.0,
    start: Annotated[float, typer.Option("--from", help="Where to begin, in seconds of the trace.")] = 0.0,
    duration: Annotated[float | None, typer.Option(help="How much to replay, in seconds of the trace.")] = None,
    copies: Annotated[int, typer.Option(help="Lay a log over itself so many times.")] = 1,
    jitter: Annotated[float, typer.Option(help="Move each request of a copy by up to so many seconds.")] = 0.0,
    peak: Annotated[float | None, typer.Option(help="Scale the load to this highest rate, requests/s.")] = None,
    cv: Annotated[
        float | None, typer.Option(help="Draw rates as one process of this unevenness; 1 is Poisson.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model, by the name that step times are known for.")] = "llama-3.1-8b",
    gpu: Annotated[str, typer.Option(help="GPU, likewise.")] = "h200",
    calibration: Annotated[Path | None, typer.Option(help="Measured step times and sizes, as JSON.")] = None,
    policy: Annotated[str, typer.Option(help="NAME[@TARGET][,NAME…], or all.")] = "trimtab",
    itl_mean: Annotated[str | None, typer.Option(help="Most a request's mean gap between tokens may be.")] = None,
    itl_token: Annotated[str | None, typer.Option(help="Most its 95th percentile gap may be.")] = None,
    attain: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests that must see all of it.")] = 0.99,
    min_replicas: Annotated[int, typer.Option(min=1, help="Fewest replicas.")] = 1,
    max_replicas: Annotated[int, typer.Option(min=1, help="Most replicas.")] = 16,
    start_replicas: Annotated[
        int | None, typer.Option(min=1, help="Replicas at the start. Default: the fewest.")
    ] = None,
    cold_start: Annotated[
        float, typer.Option(min=0.0, help="Seconds from asking for a replica to its service.")
    ] = 120.0,
    router: Annotated[RouterName, typer.Option(help="Who spreads requests.")] = RouterName.LEAST_REQUEST,
    scrape_delay: Annotated[float, typer.Option(min=0.0, help="Age in seconds of what a policy sees.")] = 0.0,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Seats at the start. Default: the engine's.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token budget of a step at the start. Default: the engine's.")
    ] = None,
    watermark: Annotated[float, typer.Option(min=0.0, max=0.9, help="KV kept free at admission at the start.")] = 0.0,
    kv_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of KV cache. Default: the machine's.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Share the prefixes that a Mooncake log names.")] = True,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal replays.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with plots there.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.TABLE,
) -> None:
    """Replay a trace under policies, and score each by GPU-hours and by the requests that met their objectives.

    Exit code 2 when a flag or a file is refused, before anything is replayed; 1 when the report cannot be written after
    all.
    """
    from trimtab_simulator.errors import BadRequest, SimulatorError
    from trimtab_simulator.experiment import Experiment, without_timeline
    from trimtab_simulator.objectives import Objectives, parse_duration, parse_ttft
    from trimtab_simulator.plant.fleet import FleetSettings, plain_blocks
    from trimtab_simulator.plant.machine import START_UTILIZATION, machine_of
    from trimtab_simulator.plant.router import RouterKind
    from trimtab_simulator.plant.shared_blocks import shared_blocks
    from trimtab_simulator.policies.names import parse_policy_specs
    from trimtab_simulator.replay import ReplaySettings
    from trimtab_simulator.results import run_policy
    from trimtab_simulator.trace.load import Transform, load_trace

    for flag, file in (("--trace", trace), ("--lengths", lengths), ("--calibration", calibration)):
        check_read(flag, file)
    check_written("--report", report)
    told = _Progress()
    try:
        entries = parse_policy_specs(policy)
        if ttft is None and itl_mean is None and itl_token is None:
            raise BadRequest("no objective is given; add --ttft, --itl-mean or --itl-token")
        base, per_token = parse_ttft(ttft) if ttft is not None else (math.inf, 0.0)
        objectives = Objectives(
            base,
            per_token,
            parse_duration(itl_mean, "--itl-mean") if itl_mean is not None else None,
            parse_duration(itl_token, "--itl-token") if itl_token is not None else None,
            attain,
        )
        begin = min_replicas if start_replicas is None else start_replicas
        if not min_replicas <= begin <= max_replicas:
            raise BadRequest(
                f"--start-replicas {begin} must be within --min-replicas {min_replicas} and --max-replicas "
                f"{max_replicas}"
            )
        machine = machine_of(model, gpu, calibration)
        if kv_tokens is not None:
            machine = machine.with_kv_tokens(kv_tokens)
        budget = machine.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
        knobs: dict[Parameter, Value] = {
            Parameter.MAX_NUM_SEQS: min(machine.max_num_seqs, budget) if max_num_seqs is None else max_num_seqs,
            Parameter.MAX_NUM_BATCHED_TOKENS: budget,
            Parameter.WATERMARK: watermark,
            Parameter.GPU_MEMORY_UTILIZATION: START_UTILIZATION,
        }
        if knobs[Parameter.MAX_NUM_SEQS] > budget:
            raise BadRequest(f"--max-num-seqs {max_num_seqs} is above --max-num-batched-tokens {budget}; lower it")
        transform = Transform(start, duration, speed, copies, jitter, peak, cv)
        loaded = load_trace(trace, transform, lengths=lengths, seed=seed)
        settings = FleetSettings(
            machine,
            knobs,
            begin,
            min_replicas,
            max_replicas,
            cold_start,
            slow_gap=objectives.slow_gap,
            make_blocks=shared_blocks if prefix_caching and loaded.has_prefixes else plain_blocks,
        )
        loop = ReplaySettings(RouterKind(router.value), seed, scrape_delay)
        experiment = Experiment(loaded, settings, loop, objectives, told)
        if report is None:
            experiment = without_timeline(experiment)
        typer.echo(f"objectives: {objectives.describe()}", err=True)
        for note in loaded.notes:
            typer.echo(f"{trace}: {note}", err=True)
        results = []
        for entry in entries:
            results.append(run_policy(experiment, entry))
            told.done(results[-1])
    except SimulatorError as error:
        told.clear()
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_REFUSED) from None
    _show(experiment, results, output)
    if report is not None:
        _write(report, experiment, results)


def _show(experiment: Experiment, results: list[Result], output: Output) -> None:
    from trimtab_simulator.results import to_json

    if output is Output.JSON:
        typer.echo(json.dumps(to_json(experiment, results), indent=2))
        return
    table = Table(box=None)
    for name in ("policy", "GPU-hours", "attained", "goodput/s", "TTFT p50", "p95", "p99", "ITL p95", "recomputed"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for name in ("moves", "turns", "most"):
        table.add_column(name, justify="right")
    for result in results:
        judged = result.score
        label = result.entry.label
        if result.entry.target is None and result.target is not None:
            label += f" (best: {result.target:g})"
        table.add_row(
            label,
            f"{judged.gpu_hours:.2f}",
            f"{100 * judged.attainment:.2f} %",
            f"{judged.goodput_tokens_per_s:,.0f}",
            *(_seconds(value) for value in (judged.ttft_p50, judged.ttft_p95, judged.ttft_p99, judged.itl_p95)),
            f"{100 * judged.preempted_token_share:.2f} %",
            str(judged.decisions),
            str(max(judged.reversals_per_knob_per_10min.values(), default=0)),
            str(judged.max_replicas),
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _write(path: Path, experiment: Experiment, results: list[Result]) -> None:
    from trimtab_simulator.report import html_report

    try:
        path.write_text(html_report(experiment, results))
    except OSError as error:
        typer.echo(f"--report {path} cannot be written: {error.strerror}; name another place", err=True)
        raise typer.Exit(EXIT_NOT_WRITTEN) from None


class _Progress:
    """One line on a terminal's stderr, written over; elsewhere a line for each policy that is done."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._told_at = 0.0

    def __call__(self, what: str, share: float) -> None:
        now = time.monotonic()
        if self._is_terminal and now - self._told_at >= TOLD_EVERY_SECONDS:
            self._told_at = now
            sys.stderr.write(f"\r\x1b[K{what}: {100 * share:.0f} %")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")

    def done(self, result: Result) -> None:
        self.clear()
        judged = result.score
        typer.echo(
            f"{result.entry.label}: {judged.gpu_hours:.2f} GPU-hours, {100 * judged.attainment:.2f} % attained",
            err=True,
        )
