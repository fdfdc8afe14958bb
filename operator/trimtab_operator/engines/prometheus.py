"""Client of the administrator's Prometheus for the samples of one resource's pods. I/O only;
tuner/samples/prometheus.py parses the results.

The address and credentials come only from the operator's flags. A resource that could set an address would let its
author send requests with the operator's token to any server in the cluster.

Responses are limited in size, time and nesting. After a failure the server is not queried for a while, because
otherwise hundreds of resources would query it at every reconcile.
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

from trimtab_operator.engines.http import CONNECT_SECONDS, RequestTimeout, TooLarge, Unreachable
from trimtab_operator.engines.prometheus_http import post_form
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

MAX_ANSWER_BYTES = 8 << 20  # the samples of one engine core take about 100 KB
MAX_SCRAPES = 1000  # per pod in a response: at one scrape per second, 1000 s
MAX_PODS_PER_QUERY = 8  # per query
MAX_CONCURRENT_QUERIES = 4  # over all resources: dashboards need capacity too
DEADLINE_SECONDS = 5.0  # per query
FAILURE_BACKOFF_SECONDS = 15.0  # after a server failure
MAX_CREDENTIAL_BYTES = 1 << 16
LOOKBACK_SCRAPES = 3  # older samples are ignored
MIN_LOOKBACK_SECONDS = 30.0
CLOCK_STEP_SECONDS = 1.0  # tolerated clock difference
T = TypeVar("T")
S = TypeVar("S")
STATUSES_WITH_REASON = (400, 422, 503)  # the response body has the reason


@dataclass(frozen=True, slots=True)
class Connection:
    """Address and credentials of Prometheus, from the operator's flags.

    Raises:
        MisconfiguredOperator: A flag is invalid.
    """

    url: str
    naming: PrometheusNaming = field(default_factory=PrometheusNaming)
    scrape_seconds: float = 15.0
    """Scrape interval of the engines."""
    ca_file: Path | None = None
    is_insecure: bool = False
    """True if certificates are not verified and credentials may be sent unencrypted."""
    token_file: Path | None = None
    username: str | None = None
    password_file: Path | None = None

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise MisconfiguredOperator(problem)

    @property
    def base_url(self) -> str:
        """Return the address without a trailing slash."""
        return self.url.rstrip("/")

    @property
    def lookback_seconds(self) -> float:
        """Return the maximum age of the newest sample."""
        return max(MIN_LOOKBACK_SECONDS, LOOKBACK_SCRAPES * self.scrape_seconds)

    def _problems(self) -> list[str]:
        url, found = urlsplit(self.url), []
        if url.scheme not in ("http", "https") or not url.hostname:
            found.append(
                f"--prometheus-url: not a valid address ({self.url!r}); use http://HOST:PORT or https://HOST:PORT"
            )
        if url.username is not None or url.password is not None or url.query or url.fragment:
            found.append(
                "--prometheus-url: contains more than an address; set credentials with --prometheus-token-file, or "
                "--prometheus-username and --prometheus-password-file"
            )
        if self.token_file is not None and self.username is not None:
            found.append("--prometheus-token-file, --prometheus-username: mutually exclusive; set one of them")
        if (self.username is None) != (self.password_file is None):
            found.append("--prometheus-username, --prometheus-password-file: set both or none")
        if self.username is not None and ":" in self.username:
            found.append("--prometheus-username: must not contain a colon")
        has_credentials = self.token_file is not None or self.username is not None
        if has_credentials and url.scheme == "http" and not self.is_insecure and not _is_loopback(url.hostname):
            found.append(
                "--prometheus-url: credentials would be sent unencrypted over http; use https, or allow it with "
                "--prometheus-insecure"
            )
        if self.ca_file is not None and (self.is_insecure or url.scheme == "http"):
            found.append("--prometheus-ca-file: unused with http or --prometheus-insecure; remove one of them")
        if not 1 <= self.scrape_seconds <= 300:
            found.append(f"--prometheus-scrape-seconds: must be 1 to 300 ({self.scrape_seconds:g})")
        return [*found, *self._naming_problems()]

    def _naming_problems(self) -> list[str]:
        found = []
        for flag, name in (
            ("--prometheus-pod-label", self.naming.pod),
            ("--prometheus-namespace-label", self.naming.namespace),
            *(("--prometheus-match", name) for name in self.naming.matchers),
        ):
            if LABEL_NAME.fullmatch(name) is None or name.startswith("__"):
                found.append(f"{flag}: not a valid label name ({name!r})")
        for ours, theirs in self.naming.aliases.items():
            if METRIC_NAME.fullmatch(ours) is None or METRIC_NAME.fullmatch(theirs) is None:
                found.append(f"--prometheus-alias: not valid metric names ({ours}={theirs})")
        return found


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False


class _QueryFailed(Unreadable):
    """Failed query. `is_server_failure` is True if the failure does not depend on the query."""

    def __init__(self, message: str, *, is_server_failure: bool) -> None:
        super().__init__(message)
        self.is_server_failure = is_server_failure


class _AnswerTooLarge(Unreadable):
    """The response exceeded MAX_ANSWER_BYTES."""


class Prometheus:
    """Prometheus server, shared by all resources, as an async context manager."""

    def __init__(
        self,
        connection: Connection,
        *,
        clock: Callable[[], float] = time.time,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Open the client.

        Raises:
            MisconfiguredOperator: The CA file cannot be read.
        """
        self.connection = connection
        self._clock = clock
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # `posted` sets the deadline of the whole
            limits=httpx.Limits(max_connections=2 * MAX_CONCURRENT_QUERIES),
            follow_redirects=False,
            trust_env=False,
            verify=_ssl_context(connection),
            transport=transport,
        )
        self._queries = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)
        self._decoding = asyncio.Lock()  # decoding takes several times the size of the response
        self._clock_offset = 0.0
        self._failures: dict[str | None, tuple[float, ScrapeFailure]] = {}
        """Time and last failure of each namespace's queries; the key None is the server."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def samples(
        self, namespace: str, pods: Mapping[str, float], labels: Mapping[str, str]
    ) -> dict[str, Sample | ScrapeFailure]:
        """Return the newest sample of each pod, by the operator's clock. `pods` maps names to creation times: older
        samples belong to an earlier pod of the same name.
        """
        resting = self._recent_failure(namespace)
        if resting is not None:
            return dict.fromkeys(pods, resting)
        names = sorted(pods)
        parts = [names[at : at + MAX_PODS_PER_QUERY] for at in range(0, len(names), MAX_PODS_PER_QUERY)]
        try:
            found = [await self._scrapes(namespace, part, labels) for part in parts]
        except Unreadable as error:
            is_server_failure = isinstance(error, _QueryFailed) and error.is_server_failure
            absent = ScrapeFailure(f"Prometheus at {self.connection.base_url}: {error}", Reason.PROMETHEUS_UNAVAILABLE)
            self._failures[None if is_server_failure else namespace] = self._clock(), absent
            return dict.fromkeys(pods, absent)
        return {
            pod: self._sample(pod, scrapes.get(pod, {}), pods[pod], offset)
            for part, (scrapes, offset) in zip(parts, found, strict=True)
            for pod in part
        }

    def _recent_failure(self, namespace: str) -> ScrapeFailure | None:
        """Return the recent failure because of which no query is sent now. None if there is none."""
        now = self._clock()
        self._failures = {
            namespace_: failed
            for namespace_, failed in self._failures.items()
            if now - failed[0] < FAILURE_BACKOFF_SECONDS
        }
        failed = self._failures.get(None) or self._failures.get(namespace)
        return None if failed is None else failed[1]

    async def _scrapes(self, namespace: str, pods: Sequence[str], labels: Mapping[str, str]) -> tuple[Scrapes, float]:
        """Return the recent scrapes of these pods, and how far Prometheus' clock is ahead in seconds.

        Raises:
            Unreadable: The query failed.
        """
        seconds = self.connection.lookback_seconds
        query = range_query(self.connection.naming, namespace=namespace, pods=pods, seconds=seconds, labels=labels)
        try:
            async with self._queries:
                offset, body = await _gather_both(self._measure_clock_offset(), self.query(query))
        except _AnswerTooLarge:
            if len(pods) == 1:
                raise
            half = len(pods) // 2
            one, offset = await self._scrapes(namespace, pods[:half], labels)
            other, _ = await self._scrapes(namespace, pods[half:], labels)
            return {**one, **other}, offset
        async with self._decoding:
            return await asyncio.to_thread(self._decoded, body), offset  # it would block the event loop

    def _decoded(self, body: bytes) -> Scrapes:
        found = parse_matrix(body)
        most = max((len(series.samples) for series in found), default=0)
        if most > MAX_SCRAPES:  # each becomes a page: together they would exceed the size of the response by far
            raise Unreadable(f"the response has {most:,} samples of one series; at most {MAX_SCRAPES:,} are supported")
        return group_scrapes(found, self.connection.naming)

    def _sample(
        self, pod: str, targets: Mapping[str, Sequence[Page]], created_at: float, offset: float
    ) -> Sample | ScrapeFailure:
        try:
            page = newest_page(pod, targets, since=created_at + offset)
        except DuplicateTargets as error:
            return ScrapeFailure(
                f"Prometheus: {error}; drop all but one, or select one with spec.metrics.labels",
                Reason.METRICS_DUPLICATED,
            )
        except Unreadable as error:
            return ScrapeFailure(
                f"Prometheus: {error} in the last {self.connection.lookback_seconds:g} s (is it a target, with its "
                f"name in label {self.connection.naming.pod}?)"
            )
        try:
            return sample_of(page.series, at=page.at - offset)
        except Unreadable as error:
            return ScrapeFailure(f"Prometheus: pod {pod}: {error}")

    async def _measure_clock_offset(self) -> float:
        """Return how far Prometheus' clock is ahead, in seconds. The last value is kept until it is clearly wrong,
        so that a scrape that is read twice gets the same time.
        """
        sent = self._clock()
        at = parse_clock(await self.query("time()"))
        received = self._clock()
        measured, mismatch = at - (sent + received) / 2, (received - sent) / 2 + CLOCK_STEP_SECONDS
        if abs(measured - self._clock_offset) > mismatch:
            self._clock_offset = measured
        return self._clock_offset

    async def query(self, query: str, *, at: float | None = None) -> bytes:
        """Return the response body of an instant query, as of now or `at`.

        Raises:
            Unreadable: The query failed. The message is for the Prometheus administrator.
        """
        form = {"query": query, "timeout": f"{DEADLINE_SECONDS:g}s", **({} if at is None else {"time": f"{at:.3f}"})}
        url = f"{self.connection.base_url}/api/v1/query"
        reply = await post_form(
            self._http,
            url,
            headers=await asyncio.to_thread(self._headers),
            form=form,
            deadline_seconds=DEADLINE_SECONDS,
            max_bytes=MAX_ANSWER_BYTES,
        )
        if isinstance(reply, TooLarge):
            raise _AnswerTooLarge(reply.message.removeprefix(f"{url}: "))
        if isinstance(reply, Unreachable):
            raise _QueryFailed(
                reply.message.removeprefix(f"{url}: "), is_server_failure=not isinstance(reply, RequestTimeout)
            )
        if reply.status in (401, 403):
            raise _QueryFailed(f"it rejects the operator's credentials (status {reply.status})", is_server_failure=True)
        if reply.status not in (200, *STATUSES_WITH_REASON):
            raise _QueryFailed(f"it responds with status {reply.status}", is_server_failure=True)
        return reply.body

    def _headers(self) -> dict[str, str]:
        """Return the credentials. The files are read at each request, because service account tokens rotate."""
        if self.connection.token_file is not None:
            token = _credential(self.connection.token_file)
            if not token.isascii():
                raise _QueryFailed(
                    f"the operator's {self.connection.token_file} does not contain a token", is_server_failure=True
                )
            return {"Authorization": f"Bearer {token}"}
        if self.connection.username is not None and self.connection.password_file is not None:
            pair = f"{self.connection.username}:{_credential(self.connection.password_file)}"
            return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
        return {}


async def _gather_both(one: Awaitable[T], other: Awaitable[S]) -> tuple[T, S]:
    """Return both results after both have finished, so that a failure leaves no request in flight."""
    first, second = await asyncio.gather(one, other, return_exceptions=True)
    if isinstance(first, BaseException):
        raise first
    if isinstance(second, BaseException):
        raise second
    return first, second


def _ssl_context(connection: Connection) -> ssl.SSLContext | bool:
    """Return a TLS context with the given CA, or with the system's CAs."""
    if connection.is_insecure:
        return False
    try:
        return ssl.create_default_context(cafile=connection.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise MisconfiguredOperator(f"--prometheus-ca-file: {connection.ca_file} cannot be read: {error}") from error


def _credential(path: Path) -> str:
    """Return the single line of a file.

    Raises:
        Unreadable: The file is unusable. The message does not contain its content.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CREDENTIAL_BYTES).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _QueryFailed(
            f"the operator's {path} cannot be read: {type(error).__name__}", is_server_failure=True
        ) from error
    if not text or not text.isprintable():
        raise _QueryFailed(f"the operator's {path} must contain one line of text", is_server_failure=True)
    return text
