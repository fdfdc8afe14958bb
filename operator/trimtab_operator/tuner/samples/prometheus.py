"""PromQL queries, and parsing of their results into the metrics pages that Prometheus scraped. Pure.

Samples are queried as scraped, with their timestamps (a range selector), never as rates: `rate` extrapolates gaps and
hides resets, and the step-time model needs exact sums. A page from Prometheus is therefore parsed like one from the
engine (`series`). One result holds whole scrapes, because Prometheus commits a scrape at once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_operator.tuner.samples.series import USED_NAMES, Series, Unreadable

MAX_SERIES = 64_000  # per response: about 200 series of an engine are read
MAX_POINTS = 1_000_000  # per response
MAX_QUOTE_CHARS = 300  # of untrusted text in messages
LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SUFFIXES = ("_bucket", "_sum", "_count", "_total")
ENGINES_LABELS = frozenset(
    {"model_name", "engine", "le", "reason", "finished_reason", "kind", "mode", "state", "field", "block_size"}
)
"""Labels that engines set. All others come from the scrape: pods that differ in them were scraped twice."""


class DuplicateTargets(Unreadable):
    """One pod was scraped as several targets; their sum would double the load."""


@dataclass(frozen=True, slots=True)
class PrometheusNaming:
    """Names of series and labels in one Prometheus installation."""

    pod: str = "pod"
    namespace: str = "namespace"
    matchers: Mapping[str, str] = field(default_factory=dict)
    """Labels that every series must have, such as the cluster's name."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of metric families there, by the engine's names."""

    def stored_name(self, name: str) -> str:
        """Return the stored name of a series: its family's alias with the same suffix."""
        if name in self.aliases:
            return self.aliases[name]
        for suffix in SUFFIXES:
            family = name.removesuffix(suffix)
            if family != name and family in self.aliases:
                return self.aliases[family] + suffix
        return name


@dataclass(frozen=True, slots=True)
class StoredSeries:
    """One series of a result, with its samples by time."""

    name: str
    labels: Mapping[str, str]
    samples: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Page:
    """Metrics of one target in one scrape, at `at` by Prometheus' clock."""

    at: float
    series: Series


Scrapes = Mapping[str, Mapping[str, Sequence[Page]]]
"""Pages by pod and by scraped target, oldest first."""


def range_query(
    naming: PrometheusNaming,
    *,
    namespace: str,
    pods: Iterable[str] | re.Pattern[str],
    seconds: float,
    labels: Mapping[str, str] | None = None,
    names: Iterable[str] = USED_NAMES,
) -> str:
    """Return PromQL for every sample of these pods, or those matching the pattern, in the last `seconds`.

    `labels` restricts it further. Namespace and pods always apply, whatever `labels` contains.
    """
    stored = "|".join(sorted({naming.stored_name(name) for name in names}))
    wanted = {**(labels or {}), **naming.matchers, naming.namespace: namespace}
    wanted.pop(naming.pod, None)
    matchers = [f"__name__=~{_quoted(stored)}", *(f"{name}={_quoted(value)}" for name, value in sorted(wanted.items()))]
    wanted_pods = pods.pattern if isinstance(pods, re.Pattern) else "|".join(re.escape(pod) for pod in sorted(pods))
    matchers.append(f"{naming.pod}=~{_quoted(wanted_pods)}")
    return f"{{{', '.join(matchers)}}}[{max(1, math.ceil(seconds))}s]"


def _quoted(text: str) -> str:
    """Return a PromQL string literal, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def parse_matrix(body: bytes | str) -> list[StoredSeries]:
    """Parse the result of a range selector or range query. Raise Unreadable, with Prometheus' error if it rejected the
    query.
    """
    result = _result(body, "matrix")
    if not isinstance(result, list) or len(result) > MAX_SERIES:
        raise Unreadable(f"the response is not a list of at most {MAX_SERIES:,} series")
    found, points = [], 0
    for entry in result:
        if not isinstance(entry, dict) or "values" not in entry:
            continue  # a native histogram, which is not used
        series = _stored_series(entry)
        points += len(series.samples)
        if points > MAX_POINTS:
            raise Unreadable(f"the response has more than {MAX_POINTS:,} samples")
        found.append(series)
    return found


def parse_clock(body: bytes | str) -> float:
    """Parse the result of `time()`. Raise Unreadable."""
    result = _result(body, "scalar")
    try:
        if not isinstance(result, list) or len(result) != 2:
            raise ValueError(f"{str(result)[:MAX_QUOTE_CHARS]} is not a pair")
        return _time(result[0])
    except ValueError as error:
        raise Unreadable(f"the response has no time: {error}") from error


def _result(body: bytes | str, kind: str) -> object:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the response is not JSON: {str(error)[:MAX_QUOTE_CHARS]}") from error
    if not isinstance(answer, dict) or answer.get("status") not in ("success", "error"):
        raise Unreadable("the server is not Prometheus: its response has no status")
    if answer["status"] == "error":
        reason = " ".join(f"{answer.get('errorType', '')}: {answer.get('error', '')}".split())
        raise Unreadable(f"it rejects the query: {reason[:MAX_QUOTE_CHARS]}")
    data = answer.get("data")
    if not isinstance(data, dict) or data.get("resultType") != kind:
        raise Unreadable(f"the response is not a {kind}")
    return data.get("result")


def _stored_series(entry: Mapping[str, object]) -> StoredSeries:
    metric, values = entry.get("metric"), entry["values"]
    if not isinstance(metric, dict) or not isinstance(values, list):
        raise Unreadable("a series has no labels or no values")
    if not all(isinstance(name, str) and isinstance(value, str) for name, value in metric.items()):
        raise Unreadable("a label is not a string")
    labels = dict(metric)
    name = labels.pop("__name__", "")
    try:
        samples = [_sample(pair) for pair in values]
    except (TypeError, ValueError) as error:
        raise Unreadable(
            f"a sample of {name[:MAX_QUOTE_CHARS]} cannot be read: {str(error)[:MAX_QUOTE_CHARS]}"
        ) from error
    return StoredSeries(name, labels, samples)


def _sample(pair: object) -> tuple[float, float]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"{pair!r} is not a time and a value")
    return _time(pair[0]), _number(pair[1])


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a time")
    return float(value)


def _number(text: object) -> float:
    if not isinstance(text, str) or "_" in text:
        raise ValueError(f"{text!r} is not a number")
    return float(text)


def group_scrapes(
    found: Iterable[StoredSeries], naming: PrometheusNaming, *, names: Iterable[str] = USED_NAMES
) -> Scrapes:
    """Group samples by scrape. Series without a pod or with another name are dropped."""
    own_names = {naming.stored_name(name): name for name in names}
    targets: dict[str, dict[str, dict[float, dict[str, list[tuple[Mapping[str, str], float]]]]]] = {}
    for stored in found:
        name, pod = own_names.get(stored.name), stored.labels.get(naming.pod)
        if name is None or not pod:
            continue
        own = {label: value for label, value in stored.labels.items() if label in ENGINES_LABELS}
        pages = targets.setdefault(pod, {}).setdefault(_target(stored.labels, naming), {})
        for at, value in stored.samples:
            pages.setdefault(at, {}).setdefault(name, []).append((own, value))
    return {
        pod: {target: [Page(at, pages[at]) for at in sorted(pages)] for target, pages in by_target.items()}
        for pod, by_target in targets.items()
    }


def _target(labels: Mapping[str, str], naming: PrometheusNaming) -> str:
    """Return the labels of the scrape as a readable text."""
    given = {name: value for name, value in labels.items() if name not in ENGINES_LABELS}
    for known in (naming.pod, naming.namespace, *naming.matchers):
        given.pop(known, None)
    return ", ".join(f"{name}={value}" for name, value in sorted(given.items()))


def newest_page(pod: str, targets: Mapping[str, Sequence[Page]], *, since: float = -math.inf) -> Page:
    """Return the last page of a pod since `since`; earlier pages belong to another pod of that name.

    Raise DuplicateTargets if it was scraped as several targets, Unreadable if it was not scraped.
    """
    alive = {target: pages[-1] for target, pages in targets.items() if pages and pages[-1].at >= since}
    if len(alive) > 1:
        names = "; ".join(f"({target})" for target in sorted(alive))
        raise DuplicateTargets(f"pod {pod} is scraped as {len(alive)} targets: {names[:MAX_QUOTE_CHARS]}")
    if not alive:
        raise Unreadable(f"no scrape of pod {pod}")
    return next(iter(alive.values()))
