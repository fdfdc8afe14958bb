"""The administrator's Prometheus: which samples it has of the pods of one resource. I/O; what its answers mean is
tuner/samples/prometheus.py's.

Its address and its credentials come from the operator's flags alone. A resource that could name an address would make
the operator ask any server inside the cluster, with the operator's own token.

An answer is bounded in size, time and nesting. After a failure the server is left alone for a while: hundreds of
resources would ask it at every look.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit

import httpx

from trimtab_operator.engines.http import CONNECT_SECONDS, TooLarge, TooSlow, Unreachable
from trimtab_operator.engines.prometheus_http import posted
from trimtab_operator.engines.scrape import ScrapeFailure
from trimtab_operator.errors import MisconfiguredOperator
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import Sample
from trimtab_operator.tuner.samples.prometheus import (
    LABEL_NAME,
    METRIC_NAME,
    DuplicateTargets,
    Page,
    PrometheusNaming,
    Scrapes,
    group_scrapes,
    newest_page,
    parse_clock,
    parse_matrix,
    range_query,
)
from trimtab_operator.tuner.samples.series import Unreadable, sample_of

MAX_ANSWER_BYTES = 8 << 20  # the samples of one engine core are about 100 KB
MAX_SCRAPES = 1000  # of one pod in an answer: one a second looks back for that many seconds at most
PODS_AT_ONCE = 8  # of one query
QUERIES_AT_ONCE = 4  # of all resources: others look at their dashboards meanwhile
DEADLINE_SECONDS = 5.0  # of one query
IDLE_RECONCILE_SECONDS = 15.0  # after a failure of the server
MAX_CREDENTIAL_BYTES = 1 << 16
SCRAPES_LOOKED_BACK = 3  # samples that are older than so many scrapes are as good as none
LEAST_LOOK_BACK_SECONDS = 30.0
CLOCK_STEP_SECONDS = 1.0  # by which two clocks may differ without a correction
T = TypeVar("T")
S = TypeVar("S")
EXPLAINED = (400, 422, 503)  # statuses whose reason is in the answer


@dataclass(frozen=True, slots=True)
class Connection:
    """Where Prometheus is, and how it is asked: the flags of the operator. Raises MisconfiguredOperator."""

    url: str
    naming: PrometheusNaming = field(default_factory=PrometheusNaming)
    scrape_seconds: float = 15.0
    """How often it scrapes engines."""
    ca_file: Path | None = None
    is_insecure: bool = False
    """Whether a certificate that nobody signed will do, and credentials may travel in clear."""
    token_file: Path | None = None
    username: str | None = None
    password_file: Path | None = None

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise MisconfiguredOperator(problem)

    @property
    def base_url(self) -> str:
        """The address without a slash at its end."""
        return self.url.rstrip("/")

    @property
    def look_back_seconds(self) -> float:
        """How old the newest sample may be."""
        return max(LEAST_LOOK_BACK_SECONDS, SCRAPES_LOOKED_BACK * self.scrape_seconds)

    def _problems(self) -> list[str]:
        url, found = urlsplit(self.url), []
        if url.scheme not in ("http", "https") or not url.hostname:
            found.append(f"--prometheus-url: {self.url!r} is no address; write http://HOST:PORT or https://HOST:PORT")
        if url.username is not None or url.password is not None or url.query or url.fragment:
            found.append(
                "--prometheus-url: holds more than an address; give credentials by --prometheus-token-file, or "
                "--prometheus-username and --prometheus-password-file"
            )
        if self.token_file is not None and self.username is not None:
            found.append("--prometheus-token-file, --prometheus-username: give one kind of credentials")
        if (self.username is None) != (self.password_file is None):
            found.append("--prometheus-username, --prometheus-password-file: give both, or none")
        if self.username is not None and ":" in self.username:
            found.append("--prometheus-username: must hold no colon")
        has_credentials = self.token_file is not None or self.username is not None
        if has_credentials and url.scheme == "http" and not self.is_insecure and not _is_loopback(url.hostname):
            found.append(
                "--prometheus-url: credentials would travel in clear over http; use https, or allow it by "
                "--prometheus-insecure"
            )
        if self.ca_file is not None and (self.is_insecure or url.scheme == "http"):
            found.append("--prometheus-ca-file: says nothing over http, or with --prometheus-insecure; leave one out")
        if not 1 <= self.scrape_seconds <= 300:
            found.append(f"--prometheus-scrape-seconds: {self.scrape_seconds:g} must be 1 to 300")
        return [*found, *self._naming_problems()]

    def _naming_problems(self) -> list[str]:
        found = []
        for flag, name in (
            ("--prometheus-pod-label", self.naming.pod),
            ("--prometheus-namespace-label", self.naming.namespace),
            *(("--prometheus-match", name) for name in self.naming.matchers),
        ):
            if LABEL_NAME.fullmatch(name) is None or name.startswith("__"):
                found.append(f"{flag}: {name!r} is no name of a label")
        for ours, theirs in self.naming.aliases.items():
            if METRIC_NAME.fullmatch(ours) is None or METRIC_NAME.fullmatch(theirs) is None:
                found.append(f"--prometheus-alias: {ours}={theirs} are no names of metrics")
        return found


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False


class _Failed(Unreadable):
    """A query failed. `for_all`: it was the server's failure, whatever was asked."""

    def __init__(self, message: str, *, for_all: bool) -> None:
        super().__init__(message)
        self.for_all = for_all


class _AskedForTooMuch(Unreadable):
    """The answer was larger than is read."""


class Prometheus:
    """One server, asked for all resources. Use it as a context."""

    def __init__(
        self,
        connection: Connection,
        *,
        clock: Callable[[], float] = time.time,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Raises MisconfiguredOperator where the CA cannot be read."""
        self.connection = connection
        self._clock = clock
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # `posted` sets the deadline of the whole
            limits=httpx.Limits(max_connections=2 * QUERIES_AT_ONCE),
            follow_redirects=False,
            trust_env=False,
            verify=_trust(connection),
            transport=transport,
        )
        self._asking = asyncio.Semaphore(QUERIES_AT_ONCE)
        self._decoding = asyncio.Lock()  # a large answer takes several times its size while it is decoded
        self._ahead = 0.0
        self._failures: dict[str | None, tuple[float, ScrapeFailure]] = {}
        """The last failure of each namespace's queries, and when it was; under None that of the server."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def samples(
        self, namespace: str, pods: Mapping[str, float], labels: Mapping[str, str]
    ) -> dict[str, Sample | ScrapeFailure]:
        """The newest sample of each pod, dated by the operator's clock. `pods` has when each was created: what was
        measured before was another pod of that name."""
        resting = self._resting(namespace)
        if resting is not None:
            return dict.fromkeys(pods, resting)
        names = sorted(pods)
        parts = [names[at : at + PODS_AT_ONCE] for at in range(0, len(names), PODS_AT_ONCE)]
        try:
            found = [await self._scrapes(namespace, part, labels) for part in parts]
        except Unreadable as error:
            is_the_servers = isinstance(error, _Failed) and error.for_all
            absent = ScrapeFailure(f"Prometheus at {self.connection.base_url}: {error}", Reason.PROMETHEUS_UNAVAILABLE)
            self._failures[None if is_the_servers else namespace] = self._clock(), absent
            return dict.fromkeys(pods, absent)
        return {
            pod: self._sample(pod, scrapes.get(pod, {}), pods[pod], ahead)
            for part, (scrapes, ahead) in zip(parts, found, strict=True)
            for pod in part
        }

    def _resting(self, namespace: str) -> ScrapeFailure | None:
        """Why nothing is asked now, if it is so."""
        now = self._clock()
        self._failures = {
            who: failed for who, failed in self._failures.items() if now - failed[0] < IDLE_RECONCILE_SECONDS
        }
        failed = self._failures.get(None) or self._failures.get(namespace)
        return None if failed is None else failed[1]

    async def _scrapes(self, namespace: str, pods: Sequence[str], labels: Mapping[str, str]) -> tuple[Scrapes, float]:
        """What was scraped of these pods lately, and how far Prometheus' clock is ahead. Raises Unreadable."""
        seconds = self.connection.look_back_seconds
        query = range_query(self.connection.naming, namespace=namespace, pods=pods, seconds=seconds, labels=labels)
        try:
            async with self._asking:
                ahead, body = await _both(self._seconds_ahead(), self.query(query))
        except _AskedForTooMuch:
            if len(pods) == 1:
                raise
            half = len(pods) // 2
            one, ahead = await self._scrapes(namespace, pods[:half], labels)
            other, _ = await self._scrapes(namespace, pods[half:], labels)
            return {**one, **other}, ahead
        async with self._decoding:
            return await asyncio.to_thread(self._decoded, body), ahead  # it would hold up everybody

    def _decoded(self, body: bytes) -> Scrapes:
        found = parse_matrix(body)
        most = max((len(series.samples) for series in found), default=0)
        if most > MAX_SCRAPES:  # each becomes a page: together they would take far more memory than the answer
            raise Unreadable(f"the answer has {most:,} samples of one series, where a few were asked for")
        return group_scrapes(found, self.connection.naming)

    def _sample(
        self, pod: str, targets: Mapping[str, Sequence[Page]], created_at: float, ahead: float
    ) -> Sample | ScrapeFailure:
        try:
            page = newest_page(pod, targets, since=created_at + ahead)
        except DuplicateTargets as error:
            return ScrapeFailure(
                f"Prometheus: {error}; drop all but one, or choose by spec.metrics.labels", Reason.METRICS_DUPLICATED
            )
        except Unreadable as error:
            return ScrapeFailure(
                f"Prometheus: {error} in the last {self.connection.look_back_seconds:g} s (is it a target, with its "
                f"name in label {self.connection.naming.pod}?)"
            )
        try:
            return sample_of(page.series, at=page.at - ahead)
        except Unreadable as error:
            return ScrapeFailure(f"Prometheus: pod {pod}: {error}")

    async def _seconds_ahead(self) -> float:
        """How far its clock is ahead of ours. What is known holds until it is clearly wrong: a scrape that is looked at
        twice must have one date."""
        sent = self._clock()
        at = parse_clock(await self.query("time()"))
        received = self._clock()
        measured, mismatch = at - (sent + received) / 2, (received - sent) / 2 + CLOCK_STEP_SECONDS
        if abs(measured - self._ahead) > mismatch:
            self._ahead = measured
        return self._ahead

    async def query(self, query: str, *, at: float | None = None) -> bytes:
        """The body of the answer to one question, asked now or as of `at`. Raises Unreadable in words for whoever runs
        Prometheus."""
        form = {"query": query, "timeout": f"{DEADLINE_SECONDS:g}s", **({} if at is None else {"time": f"{at:.3f}"})}
        url = f"{self.connection.base_url}/api/v1/query"
        reply = await posted(
            self._http,
            url,
            headers=await asyncio.to_thread(self._headers),
            form=form,
            deadline_seconds=DEADLINE_SECONDS,
            max_bytes=MAX_ANSWER_BYTES,
        )
        if isinstance(reply, TooLarge):
            raise _AskedForTooMuch(reply.message.removeprefix(f"{url}: "))
        if isinstance(reply, Unreachable):
            raise _Failed(reply.message.removeprefix(f"{url}: "), for_all=not isinstance(reply, TooSlow))
        if reply.status in (401, 403):
            raise _Failed(f"it refuses the operator's credentials (status {reply.status})", for_all=True)
        if reply.status not in (200, *EXPLAINED):
            raise _Failed(f"it answers with status {reply.status}", for_all=True)
        return reply.body

    def _headers(self) -> dict[str, str]:
        """Credentials, read anew each time: tokens of service accounts rotate."""
        if self.connection.token_file is not None:
            token = _credential(self.connection.token_file)
            if not token.isascii():
                raise _Failed(f"the operator's {self.connection.token_file} is no token", for_all=True)
            return {"Authorization": f"Bearer {token}"}
        if self.connection.username is not None and self.connection.password_file is not None:
            pair = f"{self.connection.username}:{_credential(self.connection.password_file)}"
            return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
        return {}


async def _both(one: Awaitable[T], other: Awaitable[S]) -> tuple[T, S]:
    """Both results, once both are there: one that fails leaves nothing under way behind the caller's back."""
    first, second = await asyncio.gather(one, other, return_exceptions=True)
    if isinstance(first, BaseException):
        raise first
    if isinstance(second, BaseException):
        raise second
    return first, second


def _trust(connection: Connection) -> ssl.SSLContext | bool:
    """Whose certificates are believed: the given CA's, or those that the system knows."""
    if connection.is_insecure:
        return False
    try:
        return ssl.create_default_context(cafile=connection.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise MisconfiguredOperator(f"--prometheus-ca-file: {connection.ca_file} cannot be read: {error}") from error


def _credential(path: Path) -> str:
    """The one line of a file. Raises Unreadable without its content."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CREDENTIAL_BYTES).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _Failed(f"the operator's {path} cannot be read: {type(error).__name__}", for_all=True) from error
    if not text or not text.isprintable():
        raise _Failed(f"the operator's {path} is not one line of text", for_all=True)
    return text
