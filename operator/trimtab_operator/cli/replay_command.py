"""`trimtab replay`: run the tuner on metrics from Prometheus or on recorded samples, and compare the decisions.

The command changes no engine and no cluster. It reads files, or queries Prometheus with the user's credentials.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from trimtab_operator.cli import prometheus_flags
from trimtab_operator.cli.shared import check_readable, check_writable, exit_with_error
from trimtab_operator.errors import InvalidSpec, MisconfiguredOperator
from trimtab_operator.planning.tuning import settings_of
from trimtab_operator.resource.live_parameters import live_parameters
from trimtab_operator.resource.spec import KIND, InferenceDeployment
from trimtab_operator.resource.time import parse_time
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_operator.tuner.replay import (
    DecisionRecord,
    ReplayReport,
    Row,
    Verdict,
    compare_decisions,
    record_of,
    replay,
)
from trimtab_operator.tuner.samples.codec import from_json as snapshots_from_json
from trimtab_operator.tuner.samples.codec import to_json as snapshots_to_json
from trimtab_operator.tuner.samples.prometheus import PrometheusNaming, StoredSeries, parse_matrix, range_query
from trimtab_operator.tuner.samples.recorded import RECORDED_NAMES, Limits, Tick, build_ticks
from trimtab_operator.tuner.samples.series import Unreadable
from trimtab_operator.tuner.settings import Mode, Pace, Settings
from trimtab_operator.tuner.stored import decision_from_json

EXIT_DIFFERS = 1
EXIT_NOT_WRITTEN = 3
MAX_FILE_BYTES = 1 << 30
BLOCK_SIZE = 16  # tokens of a KV block, the engine's default
CHUNK_SECONDS = 600.0  # of one query
MAX_CHUNKS = 1000
PIPED_WIDTH = 150
AGO = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


ABOUT = (
    "Run the tuner on a recording and compare its decisions with the original ones.\n\n"
    "A replay is open loop: new decisions do not change the recorded metrics. At each sample the tuner gets the values "
    "that the engines actually ran, and the replay compares the changes that it would have made. A change that the "
    "tuner repeats without effect is one line with its duration. From Prometheus, single requests are sampled from "
    "histograms, so predictions differ slightly from the original ones.\n\n"
    "Exit code 0 if the decisions are the same, 1 if they differ, 2 if a file or a flag is invalid, 3 if --save cannot "
    "be written."
)
EXAMPLES = """Examples:

trimtab replay --prometheus http://localhost:9090 --from 2h -f deployment.yaml --save samples.jsonl

trimtab replay samples.jsonl -f deployment.yaml

trimtab why NAME -n NAMESPACE -o json | trimtab replay range.json -f deployment.yaml --decided -"""


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


def replay_recording(
    recording: Annotated[
        Path | None,
        typer.Argument(
            help="Response of Prometheus to a range query (`…[30m]` or query_range), or samples written by --save. "
            "Plain or gzip; - reads standard input."
        ),
    ] = None,
    resource: Annotated[
        Path | None,
        typer.Option(
            "--resource",
            "-f",
            help="YAML of the InferenceDeployment, with its mode, objectives, bounds and start values.",
        ),
    ] = None,
    decided: Annotated[
        Path | None,
        typer.Option(
            help="Original decisions: output of `trimtab why NAME -o json`, or of `kubectl get -o json` for the "
            "resource. Default: the changes in the recording."
        ),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(help="URL of a Prometheus to query instead of a file.", rich_help_panel=prometheus_flags.PANEL),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="With --prometheus: name of the InferenceDeployment. Default: from --resource."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="With --prometheus: namespace of the InferenceDeployment. Default: from --resource.",
        ),
    ] = None,
    begin: Annotated[
        str,
        typer.Option(
            "--from", help="With --prometheus: start as 2026-11-22T10:00Z, Unix seconds, or a time ago such as 2h."
        ),
    ] = "1h",
    end: Annotated[str, typer.Option("--to", help="With --prometheus: end, in the same formats.")] = "0s",
    tick: Annotated[float, typer.Option(min=1.0, max=300.0, help="Interval between samples, in seconds.")] = 15.0,
    within: Annotated[
        float, typer.Option(min=0.0, help="Maximum time between matching original and new decisions, in seconds.")
    ] = 120.0,
    save: Annotated[
        Path | None, typer.Option(help="Path to write the samples to, for a replay without Prometheus.")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format: table or json.")] = Output.TABLE,
    ca_file: prometheus_flags.CaFile = None,
    insecure: prometheus_flags.Insecure = False,
    token_file: prometheus_flags.TokenFile = None,
    username: prometheus_flags.Username = None,
    password_file: prometheus_flags.PasswordFile = None,
    pod_label: prometheus_flags.PodLabel = "pod",
    namespace_label: prometheus_flags.NamespaceLabel = "namespace",
    match: prometheus_flags.Match = None,
    alias: prometheus_flags.Alias = None,
) -> None:
    """Run the tuner on a recording and compare its decisions with the original ones."""
    deployment = None if resource is None else _deployment(resource)
    settings = _settings(deployment, tick)
    naming = PrometheusNaming(
        pod_label, namespace_label, _pairs("--prometheus-match", match), _pairs("--prometheus-alias", alias)
    )
    flags = prometheus_flags.Flags(
        ca_file,
        insecure,
        token_file,
        username,
        password_file,
        pod_label=pod_label,
        namespace_label=namespace_label,
        match=tuple(match or ()),
        alias=tuple(alias or ()),
    )
    limits, block_size = _limits(deployment), _block_size(deployment)
    if (recording is None) == (prometheus is None):
        exit_with_error("replay: pass either a RECORDING, or --prometheus and --from")
    if str(recording) == "-" and str(decided) == "-":
        exit_with_error("--decided: standard input is already used for the recording; pass one of the two as a file")
    check_readable("--decided", decided)
    check_writable("--save", save)
    if prometheus is not None:
        where = _where(deployment, name, namespace)
        span = _moment("--from", begin), _moment("--to", end)
        ticks = _asked(prometheus, flags, where, span, tick, limits, block_size)
    else:
        assert recording is not None
        ticks = _read(recording, naming, tick, limits, block_size)
    if save is not None:
        _save(save, ticks)
    found = replay(ticks, settings)
    then = found.moved if decided is None else _decided(decided, found)
    rows = compare_decisions(then, found.decided, within=within)
    typer.echo(
        _as_json(found, rows) if output is Output.JSON else _as_table(found, rows, has_original=decided is not None)
    )
    if any(row.verdict is not Verdict.SAME for row in rows):
        raise typer.Exit(EXIT_DIFFERS)


# --- inputs -----------------------------------------------------------------------------------------------------------


def _deployment(path: Path) -> InferenceDeployment:
    try:
        bodies = [body for body in yaml.safe_load_all(path.read_text(encoding="utf-8")) if isinstance(body, dict)]
    except (OSError, UnicodeDecodeError) as error:
        exit_with_error(f"--resource {path}: cannot be read: {error}")
    except yaml.YAMLError as error:
        exit_with_error(f"--resource {path}: not YAML: {' '.join(str(error).split())}")
    found = [body for body in bodies if body.get("kind") == KIND]
    if len(found) != 1:
        exit_with_error(f"--resource {path}: contains {len(found)} {KIND}s; pass a file with the recorded one only")
    try:
        return InferenceDeployment.parse(json.loads(json.dumps(found[0], default=str)))
    except (InvalidSpec, KeyError, TypeError) as error:
        exit_with_error(f"--resource {path}: {error}")


def _settings(deployment: InferenceDeployment | None, tick: float) -> Settings:
    """Return the tuning settings of the resource. Without a resource: mode Auto and the default objectives."""
    settings = Settings(Mode.AUTO) if deployment is None else settings_of(deployment.spec)
    if settings.mode is Mode.OFF:
        exit_with_error("--resource: spec.tuning.mode is Off, which makes no decisions; set it to Auto or Recommend")
    return replace(settings, pace=Pace(tick_seconds=tick))


def _limits(deployment: InferenceDeployment | None) -> Limits:
    """Return the range of each live parameter: the bounds, and the caps that the engines were started with."""
    limits: dict[Parameter, tuple[Value | None, Value | None]] = {Parameter.WATERMARK: (0.0, 0.9)}
    for knob in () if deployment is None else live_parameters(deployment.spec):
        bounds = getattr(deployment.spec.tuning.bounds, knob.field) if deployment is not None else None
        low = None if bounds is None or bounds.min is None else float(bounds.min)
        start = None if knob.start is None else float(knob.start)
        limits[Parameter(knob.field)] = (
            low if low is not None else start,
            None if knob.cap is None else float(knob.cap),
        )
    return limits


def _block_size(deployment: InferenceDeployment | None) -> int:
    given = None if deployment is None else deployment.spec.engine.block_size
    return BLOCK_SIZE if given is None else given


def _pairs(flag: str, given: list[str] | None) -> dict[str, str]:
    try:
        return prometheus_flags.pairs_of(flag, given or ())
    except MisconfiguredOperator as error:
        exit_with_error(str(error))


def _where(deployment: InferenceDeployment | None, name: str | None, namespace: str | None) -> tuple[str, str]:
    """Return the namespace and name of the resource to query."""
    chosen = name or (None if deployment is None else deployment.name)
    if not chosen:
        exit_with_error("replay: --prometheus needs a resource; set --name or --resource")
    return namespace or (None if deployment is None else deployment.namespace) or "default", chosen


def _moment(flag: str, text: str) -> float:
    """Parse a date, Unix seconds, or a time ago such as 2h. Return Unix seconds."""
    ago = AGO.fullmatch(text)
    if ago is not None:
        return time.time() - float(ago[1]) * UNITS[ago[2]]
    if re.fullmatch(r"\d{9,12}(\.\d+)?", text):
        return float(text)
    moment = parse_time(text)
    if moment is None:
        exit_with_error(
            f"{flag}: {text!r} is not a time; use 2026-11-22T10:00Z, Unix seconds, or a time ago such as 2h"
        )
    return moment.timestamp()


# --- recordings -------------------------------------------------------------------------------------------------------


def _asked(
    url: str,
    flags: prometheus_flags.Flags,
    where: tuple[str, str],
    span: tuple[float, float],
    tick: float,
    limits: Limits,
    block_size: int,
) -> tuple[Tick, ...]:
    """Query Prometheus in chunks of ten minutes."""
    begin, end = span
    if not begin < end:
        exit_with_error("replay: --from must be before --to")
    chunks = math.ceil((end - begin) / CHUNK_SECONDS)
    if chunks > MAX_CHUNKS:
        exit_with_error(
            f"replay: time range too long ({(end - begin) / 3600:.0f} h); use at most "
            f"{MAX_CHUNKS * CHUNK_SECONDS / 3600:.0f} h"
        )
    try:
        connection = prometheus_flags.connection_of(url, flags)
        assert connection is not None
        series = asyncio.run(_all_series(connection, where, begin, end, chunks))
        return build_ticks(series, connection.naming, every=tick, limits=limits, block_size=block_size)
    except MisconfiguredOperator as error:
        exit_with_error(str(error).replace("--prometheus-url", "--prometheus"))
    except Unreadable as error:
        hint = (
            "; check the address. From outside the cluster, use kubectl port-forward"
            if "ConnectError" in str(error)
            else ""
        )
        exit_with_error(f"--prometheus {url}: {error}{hint}")


async def _all_series(
    connection: Any, where: tuple[str, str], begin: float, end: float, chunks: int
) -> list[StoredSeries]:
    from trimtab_operator.engines.prometheus import Prometheus  # imported here, because files need no HTTP client

    namespace, name = where
    found: list[StoredSeries] = []
    async with Prometheus(connection) as client:
        for number in range(chunks):
            start = begin + number * CHUNK_SECONDS
            until = min(end, start + CHUNK_SECONDS)
            query = range_query(
                connection.naming,
                namespace=namespace,
                pods=re.compile(rf"{re.escape(name)}-g[0-9]+-0"),
                seconds=until - start,
                names=RECORDED_NAMES,
            )
            found += parse_matrix(await client.query(query, at=until))
    return found


def _read(path: Path, naming: PrometheusNaming, tick: float, limits: Limits, block_size: int) -> tuple[Tick, ...]:
    """Read a file: samples, one line per tick, or one response of Prometheus."""
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        exit_with_error(f"{path}: empty file; pass a recording")
    try:
        if '"snapshots"' in first[1][:200]:
            return tuple(_ticks(path, chain([first], lines)))
        text = "".join(line for _, line in chain([first], lines))
        return build_ticks(parse_matrix(text), naming, every=tick, limits=limits, block_size=block_size)
    except Unreadable as error:
        exit_with_error(f"{path}: {error}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers."""
    size = 0
    try:
        raw = sys.stdin.buffer if str(path) == "-" else path.open("rb")
        with raw:
            head = raw.peek(2)[:2] if hasattr(raw, "peek") else b""
            source = gzip.GzipFile(fileobj=raw) if head == b"\x1f\x8b" else raw
            for number, line in enumerate(source, 1):
                size += len(line)
                if size > MAX_FILE_BYTES:
                    exit_with_error(f"{path}: larger than {MAX_FILE_BYTES >> 30} GiB; pass a shorter recording")
                if line.strip():
                    yield number, line.decode("utf-8")
    except UnicodeDecodeError as error:
        exit_with_error(f"{path}: not a text file: {error}")
    except (OSError, EOFError) as error:
        exit_with_error(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")


def _ticks(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Tick]:
    """Yield recorded samples. Exits with the line number if a line is invalid."""
    before = -math.inf
    for number, line in lines:
        try:
            snapshots, at = snapshots_from_json(line)
        except ValueError as error:
            exit_with_error(f"{path}: line {number}: {error}")
        if at <= before:
            exit_with_error(f"{path}: line {number}: time is not after the time of the previous line")
        before = at
        yield Tick(at, snapshots)


def _save(path: Path, ticks: tuple[Tick, ...]) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            for tick in ticks:
                file.write(snapshots_to_json(tick.snapshots, now=tick.at) + "\n")
    except OSError as error:
        typer.echo(f"--save {path}: cannot be written: {error.strerror}", err=True)
        raise typer.Exit(EXIT_NOT_WRITTEN) from None


# --- original decisions -----------------------------------------------------------------------------------------------


def _decided(path: Path, found: ReplayReport) -> tuple[DecisionRecord, ...]:
    """Return the decisions of a file that were made during the recording."""
    try:
        body = json.loads(sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        exit_with_error(f"--decided {path}: cannot be read: {error}")
    except (ValueError, RecursionError) as error:
        exit_with_error(f"--decided {path}: not JSON: {error}")
    try:
        if "decisions" in body:
            made = [record_of(decision_from_json(entry)) for entry in body["decisions"]]
        else:
            made = [_of_status(entry) for entry in body["status"]["tuning"].get("history", [])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        exit_with_error(
            f"--decided {path}: contains no decisions ({error!r}); pass the output of `trimtab why -o json` or of "
            "`kubectl get -o json` for the resource"
        )
    return tuple(sorted((m for m in made if found.begin <= m.at <= found.end), key=lambda m: m.at))


def _of_status(entry: Mapping[str, Any]) -> DecisionRecord:
    moment = parse_time(entry["time"])
    if moment is None:
        raise ValueError(f"{entry['time']!r} is not a time")
    before, after = (None if entry.get(end) is None else float(entry[end]) for end in ("from", "to"))
    return DecisionRecord(
        moment.timestamp(), str(entry["knob"]), before, after, str(entry["reason"]), str(entry["message"])
    )


# --- output -----------------------------------------------------------------------------------------------------------


def _as_table(found: ReplayReport, rows: tuple[Row, ...], *, has_original: bool) -> str:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH, file=None)
    with console.capture() as captured:
        console.print(
            f"{found.ticks:,} samples of {found.replicas} replica{'s' if found.replicas != 1 else ''}, "
            f"{_time(found.begin)} to {_time(found.end)}",
            markup=False,
        )
        for period in found.periods:
            if period.reason != "Scraped":
                console.print(
                    f"  {_time(period.begin)} {period.reason}: {period.message}", markup=False, soft_wrap=True
                )
        if rows:
            table = Table(box=None)
            for heading in ("at", "", "original decision" if has_original else "recorded change", "new decision"):
                table.add_column(heading, no_wrap=heading in ("at", ""))
            for row in rows:
                table.add_row(_time(row.at), row.verdict.value, _words(row.then), _words(row.now))
            console.print(table)
        counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
        summary = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
        console.print(summary or "no decisions, neither original nor new", markup=False)
    return captured.get().rstrip("\n")


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M:%S")


def _words(made: DecisionRecord | None) -> str:
    if made is None:
        return "–"
    moved = f"{made.target} {_value(made.before)} → {_value(made.after)}"
    why = f" ({made.reason})" if made.reason else ""
    return f"{moved}{why}" + (f", repeated until {_time(made.until)}" if made.until is not None else "")


def _value(value: Value | None) -> str:
    return "–" if value is None else f"{value:.10g}"


def _as_json(found: ReplayReport, rows: tuple[Row, ...]) -> str:
    return json.dumps(
        {
            "recording": {"snapshots": found.ticks, "replicas": found.replicas, "from": found.begin, "to": found.end},
            "same": all(row.verdict is Verdict.SAME for row in rows),
            "metricsAvailable": [asdict(period) for period in found.periods],
            "rows": [
                {
                    "at": row.at,
                    "verdict": row.verdict.value,
                    "then": None if row.then is None else asdict(row.then),
                    "now": None if row.now is None else asdict(row.now),
                }
                for row in rows
            ],
        },
        indent=2,
    )
