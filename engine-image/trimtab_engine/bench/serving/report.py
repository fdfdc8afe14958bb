"""The result of a run as a table in vLLM's format, and as a file."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from trimtab_engine.bench.outputs import write_file
from trimtab_engine.errors import ConfigError

WIDTH = 50
HEADERS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
}
BUSY_CLIENT_SHARE = 0.8  # of a core: above it the client's own work affects the results
LATE_SEND_MS = 100.0
CACHED_SHARE = 0.05  # fraction of random prompts' tokens in the prefix cache, beyond their shared prefix


def table(result: dict[str, Any]) -> str:
    """Return all figures of a run, one per line."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [_line(label, result.get(key)) for label, key in _rows(result)]
    for metric, (short, header) in HEADERS.items():
        lines += _metric_lines(result, metric, short, header)
    lines += _server_lines(result.get("server", {}))
    lines.append("=" * WIDTH)
    return "\n".join(lines + warnings(result))


def _rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("Successful requests:", "completed"), ("Failed requests:", "failed")]
    if result.get("max_concurrency"):
        rows.append(("Maximum request concurrency:", "max_concurrency"))
    if isinstance(result.get("request_rate"), float):
        rows.append(("Request rate configured (RPS):", "request_rate"))
    rows += [
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
    ]
    if result.get("request_goodput") is not None:
        rows.append(("Request goodput (req/s):", "request_goodput"))
    return [
        *rows,
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ]


def _metric_lines(result: dict[str, Any], metric: str, short: str, header: str) -> list[str]:
    suffix = f"_{metric}_ms"
    found = [key for key in result if key.endswith(suffix) and "_" not in key.removesuffix(suffix)]
    if not found:
        return []
    labels = {"mean": "Mean", "median": "Median", "std": "Std"}
    rows = [(labels.get(name := key.removesuffix(suffix), name.upper()), result[key]) for key in found]
    return [header.center(WIDTH, "-"), *(_line(f"{label} {short} (ms):", value) for label, value in rows)]


def _server_lines(server: dict[str, Any]) -> list[str]:
    if not server:
        return []
    return [
        "Server during the run".center(WIDTH, "-"),
        *(_line(f"{name.replace('_', ' ').capitalize()}:", value) for name, value in server.items()),
    ]


def _line(label: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)
    return f"{label:<40} {text:<10}".rstrip()


def warnings(result: dict[str, Any]) -> list[str]:
    """Return one sentence per reason to doubt the figures."""
    found = []
    if result["interrupted"]:
        found.append("Interrupted: the results only include requests answered before.")
    if result["client_cpu_share"] > BUSY_CLIENT_SHARE:
        found.append(
            f"The client itself used {result['client_cpu_share']:.0%} of a core: its own work affects these latencies. "
            f"Use a lower rate or several clients."
        )
    known = result.get("server", {}).get("prefix_cache_hit_rate", 0.0)
    if result.get("dataset_name") == "random" and known - result.get("shared_prefix_share", 0.0) > CACHED_SHARE:
        found.append(
            f"{known:.0%} of these random prompts were already in the server's prefix cache: time to first "
            f"token and throughput are too good. Remove --seed, or set another one."
        )
    if result["max_send_lag_ms"] > LATE_SEND_MS:
        found.append(f"Requests were sent up to {result['max_send_lag_ms']:.0f} ms later than planned.")
    return found


def errors_line(errors: Sequence[str]) -> str:
    """Return the ten most frequent failure reasons with their counts."""
    counts = {error: errors.count(error) for error in errors}
    most = sorted(counts, key=lambda error: -counts[error])[:10]
    return "\n".join(f"  {counts[error]} × {error}" for error in most)


def file_name(*, label: str, rate: float, max_concurrency: int | None, model: str, now: datetime) -> str:
    """Return vLLM's file name of a run."""
    concurrency = f"-concurrency{max_concurrency}" if max_concurrency else ""
    return f"{label}-{rate}qps{concurrency}-{model.split('/')[-1]}-{now:%Y%m%d-%H%M%S}.json"


def save(result: dict[str, Any], path: Path, *, append: bool) -> None:
    """Write the result as JSON; appending adds it to an existing list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [*read_results(path), result] if append and path.exists() else result
    write_file(path, (json.dumps(written, indent=1) + "\n").encode())


def read_results(path: Path) -> list[Any]:
    """Return the results in a file. Raises ConfigError if it has other content."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        raise ConfigError(f"--append-result: {path} is not JSON; set another file, or move it away") from None
    return found if isinstance(found, list) else [found]
