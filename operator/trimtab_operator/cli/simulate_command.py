"""`trimtab simulate`: replay a trace of recorded load against simulated replicas, with one or more policies."""

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

from trimtab_operator.cli.shared import EXIT_INVALID_INPUT, check_readable, check_writable
from trimtab_operator.tuner.parameters import Parameter, Value

if TYPE_CHECKING:
    from trimtab_simulator.experiment import Experiment
    from trimtab_simulator.results import Result

EXIT_NOT_WRITTEN = 1
PIPED_WIDTH = 160
PROGRESS_INTERVAL_SECONDS = 0.2


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


class RouterName(StrEnum):
    SERVICE = "service"
    LEAST_REQUEST = "least-request"
    CHWBL = "chwbl"
    SGLANG = "sglang"
    LMETRIC = "lmetric"
    LLM_D = "llm-d"
    TRIMTAB = "trimtab"
    SHARED_CACHE_ORACLE = "shared-cache-oracle"


def simulate(
    trace: Annotated[
        Path, typer.Option(help="Request log (Azure, Mooncake) or request rates (ServeGen). Plain or gzip.")
    ],
    ttft: Annotated[
        str | None, typer.Option(help="TTFT target: 2s, or 2s+1/8000 to add 1/8000 s per prompt token.")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="Request lengths for rates: from ServeGen or a request log.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Speed-up factor: seconds of the trace per simulated second.")] = 1.0,
    start: Annotated[float, typer.Option("--from", help="Start of the replay, in seconds of the trace.")] = 0.0,
    duration: Annotated[float | None, typer.Option(help="Duration of the replay, in seconds of the trace.")] = None,
    copies: Annotated[int, typer.Option(help="Number of overlaid copies of the log.")] = 1,
    jitter: Annotated[float, typer.Option(help="Maximum random shift of each request of a copy, in seconds.")] = 0.0,
    peak: Annotated[float | None, typer.Option(help="Scale the load to this peak rate, in requests/s.")] = None,
    cv: Annotated[
        float | None, typer.Option(help="Coefficient of variation of the arrivals drawn from rates; 1 is Poisson.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model with calibrated step times.")] = "llama-3.1-8b",
    gpu: Annotated[str, typer.Option(help="GPU with calibrated step times.")] = "h200",
    calibration: Annotated[Path | None, typer.Option(help="JSON file with measured step times and sizes.")] = None,
    policy: Annotated[str, typer.Option(help="Policies: NAME[@TARGET][,NAME…], or all.")] = "trimtab",
    itl_mean: Annotated[str | None, typer.Option(help="Target of a request's mean inter-token latency.")] = None,
    itl_token: Annotated[
        str | None, typer.Option(help="Target of a request's 95th percentile inter-token latency.")
    ] = None,
    attain: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Fraction of requests that must meet all targets.")
    ] = 0.99,
    min_replicas: Annotated[int, typer.Option(min=1, help="Minimum replicas.")] = 1,
    max_replicas: Annotated[int, typer.Option(min=1, help="Maximum replicas.")] = 16,
    start_replicas: Annotated[
        int | None, typer.Option(min=1, help="Initial replicas. Default: --min-replicas.")
    ] = None,
    cold_start: Annotated[float, typer.Option(min=0.0, help="Start-up time of a replica, in seconds.")] = 120.0,
    router: Annotated[RouterName, typer.Option(help="Rule by which requests are routed.")] = RouterName.LEAST_REQUEST,
    routers: Annotated[
        int, typer.Option(min=1, help="Number of routers that share the load, with --router trimtab.")
    ] = 1,
    router_state_interval: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds between reports of a replica's state, with --router trimtab; 0 is exact."),
    ] = 0.0,
    scrape_delay: Annotated[
        float, typer.Option(min=0.0, help="Age of the metrics that a policy reads, in seconds.")
    ] = 0.0,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Initial max_num_seqs. Default: the engine's.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Initial token budget of a step. Default: the engine's.")
    ] = None,
    watermark: Annotated[
        float,
        typer.Option(min=0.0, max=0.9, help="Initial watermark: fraction of the KV cache that admission keeps free."),
    ] = 0.0,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV cache size in tokens. Default: from the calibration.")
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the shared prefixes of a Mooncake log.")] = True,
    seed: Annotated[int, typer.Option(help="Random seed; equal seeds give equal results.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Path of an HTML report with plots.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format: table or json.")] = Output.TABLE,
) -> None:
    """Replay a trace with each policy, and score it by GPU-hours and the share of requests that met the objectives.

    Exit code 2 if a flag or a file is invalid, before the replay starts; 1 if the report cannot be written.
    """
    from trimtab_simulator.errors import BadRequest, SimulatorError
    from trimtab_simulator.experiment import Experiment, without_timeline
    from trimtab_simulator.objectives import Objectives, parse_duration, parse_ttft
    from trimtab_simulator.plant.fleet import FleetSettings, plain_blocks
    from trimtab_simulator.plant.machine import START_UTILIZATION, machine_of
    from trimtab_simulator.plant.routing import RouterKind, RouterSettings
    from trimtab_simulator.plant.shared_blocks import shared_blocks
    from trimtab_simulator.policies.names import parse_policy_specs
    from trimtab_simulator.replay import ReplaySettings
    from trimtab_simulator.results import run_policy
    from trimtab_simulator.trace.load import Transform, load_trace

    for flag, file in (("--trace", trace), ("--lengths", lengths), ("--calibration", calibration)):
        check_readable(flag, file)
    check_writable("--report", report)
    progress = _Progress()
    try:
        entries = parse_policy_specs(policy)
        if ttft is None and itl_mean is None and itl_token is None:
            raise BadRequest("no objective is set; add --ttft, --itl-mean or --itl-token")
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
        parameters: dict[Parameter, Value] = {
            Parameter.MAX_NUM_SEQS: min(machine.max_num_seqs, budget) if max_num_seqs is None else max_num_seqs,
            Parameter.MAX_NUM_BATCHED_TOKENS: budget,
            Parameter.WATERMARK: watermark,
            Parameter.GPU_MEMORY_UTILIZATION: START_UTILIZATION,
        }
        if parameters[Parameter.MAX_NUM_SEQS] > budget:
            raise BadRequest(f"--max-num-seqs {max_num_seqs} is above --max-num-batched-tokens {budget}; lower it")
        transform = Transform(start, duration, speed, copies, jitter, peak, cv)
        loaded = load_trace(trace, transform, lengths=lengths, seed=seed)
        settings = FleetSettings(
            machine,
            parameters,
            begin,
            min_replicas,
            max_replicas,
            cold_start,
            slow_gap=objectives.slow_gap,
            make_blocks=shared_blocks if prefix_caching and loaded.has_prefixes else plain_blocks,
        )
        if router is not RouterName.TRIMTAB and (routers > 1 or router_state_interval):
            raise BadRequest(
                f"--router: {router.value} has no --routers and no --router-state-interval; remove them, or use trimtab"
            )
        routing = RouterSettings(RouterKind(router.value), routers, router_state_interval)
        loop = ReplaySettings(routing, seed, scrape_delay)
        experiment = Experiment(loaded, settings, loop, objectives, progress)
        if report is None:
            experiment = without_timeline(experiment)
        typer.echo(f"objectives: {objectives.describe()}", err=True)
        for note in loaded.notes:
            typer.echo(f"{trace}: {note}", err=True)
        results = []
        for entry in entries:
            results.append(run_policy(experiment, entry))
            progress.done(results[-1])
    except SimulatorError as error:
        progress.clear()
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_INVALID_INPUT) from None
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
        typer.echo(f"--report {path} cannot be written: {error.strerror}; pass another path", err=True)
        raise typer.Exit(EXIT_NOT_WRITTEN) from None


class _Progress:
    """Progress on stderr: one updated line on a terminal, else one line per finished policy."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._printed_at = 0.0

    def __call__(self, what: str, share: float) -> None:
        now = time.monotonic()
        if self._is_terminal and now - self._printed_at >= PROGRESS_INTERVAL_SECONDS:
            self._printed_at = now
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
