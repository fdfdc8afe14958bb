"""What Prometheus is asked, and how its answers become the pages that engines showed when they were scraped. Pure.

Samples are asked for as they were scraped, with their own timestamps (a range selector), never as rates: `rate` fills
gaps and hides resets by guessing, and a step-time model needs sums that are exact. So a page from Prometheus decodes as
a page from the engine does (`series`), and one answer holds whole scrapes: Prometheus commits a scrape at once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_operator.tuner.samples.series import USED_NAMES, Series, Unreadable

MAX_SERIES = 64_000  # of one answer: an engine has about 200 that are read
MAX_POINTS = 1_000_000  # of one answer
MAX_SAID = 300  # characters of somebody else's words
LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SUFFIXES = ("_bucket", "_sum", "_count", "_total")
ENGINES_LABELS = frozenset(
    {"model_name", "engine", "le", "reason", "finished_reason", "kind", "mode", "state", "field", "block_size"}
)
"""Labels that engines give. All others are the scrape's own: whoever differs in them was scraped twice."""


class Duplicated(Unreadable):
    """One pod was scraped as several targets: summed, they would show a load that is not there."""


@dataclass(frozen=True, slots=True)
class Naming:
    """What series are called in one installation's Prometheus."""

    pod: str = "pod"
    namespace: str = "namespace"
    matchers: Mapping[str, str] = field(default_factory=dict)
    """Labels that every series must have, such as the cluster's name."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of families there, by the engines' own, where they are stored under other ones."""

    def stored_name(self, name: str) -> str:
        """The name of a series there: its family's alias, with the same suffix."""
        if name in self.aliases:
            return self.aliases[name]
        for suffix in SUFFIXES:
            family = name.removesuffix(suffix)
            if family != name and family in self.aliases:
                return self.aliases[family] + suffix
        return name


@dataclass(frozen=True, slots=True)
class StoredSeries:
    """One series of an answer, and its samples by time."""

    name: str
    labels: Mapping[str, str]
    samples: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Page:
    """What one target showed in one scrape, at `at` by Prometheus' clock."""

    at: float
    series: Series


Scrapes = Mapping[str, Mapping[str, Sequence[Page]]]
"""Pages by pod, and by the target that was scraped, the oldest first."""


def range_query(
    naming: Naming,
    *,
    namespace: str,
    pods: Iterable[str] | re.Pattern[str],
    seconds: float,
    labels: Mapping[str, str] | None = None,
    names: Iterable[str] = USED_NAMES,
) -> str:
    """PromQL for every sample that these pods, or those of this pattern, were scraped for in the last `seconds`.

    `labels` narrows it further. The namespace and the pods always hold, whatever a label says.
    """
    stored = "|".join(sorted({naming.stored_name(name) for name in names}))
    wanted = {**(labels or {}), **naming.matchers, naming.namespace: namespace}
    wanted.pop(naming.pod, None)
    matchers = [f"__name__=~{_quoted(stored)}", *(f"{name}={_quoted(value)}" for name, value in sorted(wanted.items()))]
    wanted_pods = pods.pattern if isinstance(pods, re.Pattern) else "|".join(re.escape(pod) for pod in sorted(pods))
    matchers.append(f"{naming.pod}=~{_quoted(wanted_pods)}")
    return f"{{{', '.join(matchers)}}}[{max(1, math.ceil(seconds))}s]"


def _quoted(text: str) -> str:
    """A string literal of PromQL, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def matrix_of(body: bytes | str) -> list[StoredSeries]:
    """Decode the answer to a range selector, or to a range query. Raises Unreadable, in Prometheus' own words where it
    refused."""
    result = _result(body, "matrix")
    if not isinstance(result, list) or len(result) > MAX_SERIES:
        raise Unreadable(f"the answer is no list of at most {MAX_SERIES:,} series")
    found, points = [], 0
    for entry in result:
        if not isinstance(entry, dict) or "values" not in entry:
            continue  # a native histogram: none of those that are read
        series = _stored_series(entry)
        points += len(series.samples)
        if points > MAX_POINTS:
            raise Unreadable(f"the answer has more than {MAX_POINTS:,} samples")
        found.append(series)
    return found


def clock_of(body: bytes | str) -> float:
    """Decode the answer to `time()`: what Prometheus' clock said. Raises Unreadable."""
    result = _result(body, "scalar")
    try:
        if not isinstance(result, list) or len(result) != 2:
            raise ValueError(f"{str(result)[:MAX_SAID]} is no pair")
        return _time(result[0])
    except ValueError as error:
        raise Unreadable(f"the answer tells no time: {error}") from error


def _result(body: bytes | str, kind: str) -> object:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the answer is no JSON: {str(error)[:MAX_SAID]}") from error
    if not isinstance(answer, dict) or answer.get("status") not in ("success", "error"):
        raise Unreadable("what answers is no Prometheus: its answer has no status")
    if answer["status"] == "error":
        said = " ".join(f"{answer.get('errorType', '')}: {answer.get('error', '')}".split())
        raise Unreadable(f"it refuses: {said[:MAX_SAID]}")
    data = answer.get("data")
    if not isinstance(data, dict) or data.get("resultType") != kind:
        raise Unreadable(f"the answer is no {kind}")
    return data.get("result")


def _stored_series(entry: Mapping[str, object]) -> StoredSeries:
    metric, values = entry.get("metric"), entry["values"]
    if not isinstance(metric, dict) or not isinstance(values, list):
        raise Unreadable("a series has no labels or no values")
    if not all(isinstance(name, str) and isinstance(value, str) for name, value in metric.items()):
        raise Unreadable("a label is no text")
    labels = dict(metric)
    name = labels.pop("__name__", "")
    try:
        samples = [_sample(pair) for pair in values]
    except (TypeError, ValueError) as error:
        raise Unreadable(f"a sample of {name[:MAX_SAID]} cannot be read: {str(error)[:MAX_SAID]}") from error
    return StoredSeries(name, labels, samples)


def _sample(pair: object) -> tuple[float, float]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"{pair!r} is no time and value")
    return _time(pair[0]), _number(pair[1])


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _number(text: object) -> float:
    if not isinstance(text, str) or "_" in text:
        raise ValueError(f"{text!r} is no number")
    return float(text)


def scrapes_of(found: Iterable[StoredSeries], naming: Naming, *, names: Iterable[str] = USED_NAMES) -> Scrapes:
    """Put samples together again that were scraped together. What has no pod, or another name, is left out."""
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


def _target(labels: Mapping[str, str], naming: Naming) -> str:
    """The labels that scraping gave, as a text that people know again."""
    given = {name: value for name, value in labels.items() if name not in ENGINES_LABELS}
    for known in (naming.pod, naming.namespace, *naming.matchers):
        given.pop(known, None)
    return ", ".join(f"{name}={value}" for name, value in sorted(given.items()))


def newest_page(pod: str, targets: Mapping[str, Sequence[Page]], *, since: float = -math.inf) -> Page:
    """The last page that a pod showed, of those since `since`: what came before was another pod of that name.

    Raises Duplicated where it was scraped as more than one target, Unreadable where it was not scraped.
    """
    alive = {target: pages[-1] for target, pages in targets.items() if pages and pages[-1].at >= since}
    if len(alive) > 1:
        said = "; ".join(f"({target})" for target in sorted(alive))
        raise Duplicated(f"pod {pod} is scraped as {len(alive)} targets: {said[:MAX_SAID]}")
    if not alive:
        raise Unreadable(f"no scrape of pod {pod}")
    return next(iter(alive.values()))
