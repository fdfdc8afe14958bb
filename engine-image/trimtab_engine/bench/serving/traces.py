"""Traces: recorded arrival times, lengths and shared prefixes. Read from files, never downloaded.

- azure: CSV `TIMESTAMP,ContextTokens,GeneratedTokens`: time and lengths of each request.
- mooncake: JSON lines `timestamp,input_length,output_length,hash_ids`: the same, and which blocks of 512 tokens are
  equal.
- servegen: CSV `client,window_start_s,rate,cv,pattern,arg1,arg2`: arrival processes per client and window of 600 s.
  These are parameters, from which requests are drawn, with lengths from its JSON lines.
"""

import ast
import csv
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from trimtab_engine.bench.serving.samples import Sample, Words
from trimtab_engine.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
SERVEGEN_RATE_WINDOW_SECONDS = 600
SERVEGEN_LENGTH_WINDOW_SECONDS = 21_600
TAIL_KEY = 1 << 40  # first key of unshared tokens; hash IDs are far below


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request: seconds after the trace's start, lengths in tokens, IDs of its shared blocks in order."""

    timestamp: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a trace: from `start` on for `duration` seconds of trace time, a `fraction` of its requests."""

    start: float = 0.0
    duration: float | None = None
    fraction: float = 1.0

    def holds(self, timestamp: float) -> bool:
        return timestamp >= self.start and (self.duration is None or timestamp < self.start + self.duration)


def read_trace(path: Path, *, cut: Cut, seed: int, lengths: Path | None = None) -> list[TraceRequest]:
    """Return the requests of a trace file inside the cut, in order of time, starting at 0."""
    stream = _open(path)
    first = stream.readline()
    stream.seek(0)
    if first.startswith("TIMESTAMP,"):
        requests: Iterator[TraceRequest] = _azure(stream)
    elif first.startswith("{") and "hash_ids" in first:
        requests = _mooncake(stream)
    elif first.startswith("client,window_start_s,rate"):
        return list(_shift_to_zero(_servegen(stream, lengths, cut, seed), cut.start))
    else:
        raise ConfigError(
            f"{path} begins with {first[:60]!r}, an unknown trace format; see trimtab-engine bench serve "
            f"--help for the formats"
        )
    random = np.random.default_rng(seed)
    kept = (one for one in requests if cut.holds(one.timestamp))
    return list(_shift_to_zero((one for one in kept if cut.fraction >= 1 or random.random() < cut.fraction), cut.start))


def scale_to_fit(
    requests: Sequence[TraceRequest], *, max_model_len: int | None, scale: float | None
) -> tuple[float, list[TraceRequest]]:
    """Scale the lengths by one factor so that all fit the model, and return the factor. With a given `scale`, requests
    that do not fit are truncated, the prompt first. The last token of the context stays free.
    """
    if scale is None:
        longest = max((one.input_len + one.output_len for one in requests), default=0)
        scale = min(1.0, (max_model_len - 1) / longest) if max_model_len and longest else 1.0
    return scale, [_scaled(one, scale, max_model_len) for one in requests]


def _scaled(one: TraceRequest, scale: float, max_model_len: int | None) -> TraceRequest:
    input_len, output_len = max(1, int(one.input_len * scale)), max(1, int(one.output_len * scale))
    if max_model_len is not None and input_len + output_len >= max_model_len:
        output_len = min(output_len, max_model_len - 2)
        input_len = min(input_len, max_model_len - 1 - output_len)
    return replace(one, input_len=input_len, output_len=output_len)


def samples_of(requests: Sequence[TraceRequest], words: Words, *, scale: float, speedup: float) -> list[Sample]:
    """Return the requests with prompts: equal hash IDs give equal blocks of tokens, so equal leading IDs a shared
    prefix.

    ``` hash_ids | 7 | 8 | 12 | blocks of 512 × scale tokens, the last one possibly truncated other prompt | 7 | 8 | 31
    | shares the first two blocks ```
    """
    block = max(1, round(MOONCAKE_BLOCK_TOKENS * scale))
    return [
        Sample(_prompt(one, number, words, block), one.input_len, one.output_len, timestamp=one.timestamp / speedup)
        for number, one in enumerate(requests)
    ]


def _prompt(one: TraceRequest, number: int, words: Words, block: int) -> list[int]:
    tokens: list[int] = []
    for key in one.hash_ids:
        if len(tokens) >= one.input_len:
            break
        tokens += words.of(key, block)
    if len(tokens) < one.input_len:
        tokens += words.of(TAIL_KEY + number, one.input_len - len(tokens))
    return tokens[: one.input_len]


# --- formats --------------------------------------------------------------------------------------------------------


def _open(path: Path) -> io.TextIOBase:
    try:
        data = path.read_bytes()
        return io.StringIO((gzip.decompress(data) if path.suffix == ".gz" else data).decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; set --trace-path to a trace file") from None
    except (ValueError, EOFError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _shift_to_zero(requests: Iterator[TraceRequest], start: float) -> Iterator[TraceRequest]:
    for one in sorted(requests, key=lambda one: one.timestamp):
        yield replace(one, timestamp=one.timestamp - start)


def _azure(stream: io.TextIOBase) -> Iterator[TraceRequest]:
    began: float | None = None
    for row in csv.DictReader(stream):
        whole, _, fraction = row["TIMESTAMP"].partition(".")  # seven digits, which datetime does not support
        moment = datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")
        began = moment if began is None else began
        yield TraceRequest(moment - began, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(stream: io.TextIOBase) -> Iterator[TraceRequest]:
    for line in stream:
        entry = json.loads(line)
        yield TraceRequest(
            entry["timestamp"] / 1000, entry["input_length"], entry["output_length"], tuple(entry["hash_ids"])
        )


def _servegen(stream: io.TextIOBase, lengths: Path | None, cut: Cut, seed: int) -> Iterator[TraceRequest]:
    """Draw the requests client by client, with gaps from the window's row; a fraction of them has a lower rate of the
    same shape.
    """
    if lengths is None:
        raise ConfigError("a ServeGen trace has no lengths; set --trace-lengths to its lengths file (JSON lines)")
    known = _Lengths(lengths)
    random = np.random.default_rng(seed)
    for row in csv.DictReader(stream):
        window, client = float(row["window_start_s"]), int(row["client"])
        if window + SERVEGEN_RATE_WINDOW_SECONDS <= cut.start or (
            cut.duration is not None and window >= cut.start + cut.duration
        ):
            continue
        for moment in _arrivals(row, cut.fraction, random):
            if cut.holds(window + moment):
                yield TraceRequest(window + moment, *known.draw(client, window, random))


def _arrivals(row: dict[str, str], fraction: float, random: np.random.Generator) -> Iterator[float]:
    """Return arrival seconds inside the window, of a stationary renewal process: the gap that contains the window's
    start is drawn with its length as weight, and entered at a uniform point.
    """
    shape, scale, is_gamma = float(row["arg1"]), float(row["arg2"]) / fraction, row["pattern"] == "Gamma"
    entered = random.gamma(shape + 1, scale) if is_gamma else scale * random.gamma(1 + 1 / shape) ** (1 / shape)
    moment = float(entered * random.random())
    while moment < SERVEGEN_RATE_WINDOW_SECONDS:
        yield moment
        moment += float(random.gamma(shape, scale) if is_gamma else scale * random.weibull(shape))


@dataclass(slots=True)
class _Lengths:
    """Distributions of input and output lengths by client and window; other clients' are used for missing ones."""

    path: Path
    _lines: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    _parsed: dict[tuple[int, int, str], tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in _open(self.path):
            entry = json.loads(line)
            self._lines[entry["client"], int(entry["window_start_s"])] = entry
        if not self._lines:
            raise ConfigError(f"{self.path} is empty; ServeGen's lengths are required")

    def draw(self, client: int, window: float, random: np.random.Generator) -> tuple[int, int]:
        start = int(window // SERVEGEN_LENGTH_WINDOW_SECONDS * SERVEGEN_LENGTH_WINDOW_SECONDS)
        key = (client, start)
        if key not in self._lines:
            same_time = [known for known in self._lines if known[1] == start] or list(self._lines)
            key = same_time[int(random.integers(len(same_time)))]
        return self._one(key, "input_tokens", random), self._one(key, "output_tokens", random)

    def _one(self, key: tuple[int, int], name: str, random: np.random.Generator) -> int:
        if (*key, name) not in self._parsed:
            density = ast.literal_eval(self._lines[key][name])
            weights = np.array(list(density.values()), dtype=float)
            self._parsed[*key, name] = (np.array(list(density)), np.cumsum(weights / weights.sum()))
        lengths, cumulated = self._parsed[*key, name]
        place = min(int(np.searchsorted(cumulated, random.random())), len(lengths) - 1)
        return max(1, int(lengths[place]))
