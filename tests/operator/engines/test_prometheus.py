"""Prometheus queries: within the namespace, with credentials, bounded in time and size, and isolated between
namespaces.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from fake_prometheus import NAMESPACE, FakePrometheus, exposed
from trimtab_operator.engines.prometheus import FAILURE_BACKOFF_SECONDS, MAX_ANSWER_BYTES, Connection, Prometheus
from trimtab_operator.engines.scrape import ScrapeFailure
from trimtab_operator.errors import MisconfiguredOperator
from trimtab_operator.kube.certificates import issue
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import Sample
from trimtab_operator.tuner.samples.prometheus import PrometheusNaming
from tuner_snapshots import make_sample

NOW = 1_000.0
POD = "m-g0-0"


class Clock:
    """Clocks of the operator and of Prometheus, which may differ."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.now, self.ahead = NOW, ahead

    def __call__(self) -> float:
        return self.now

    def of_prometheus(self) -> float:
        return self.now + self.ahead


Asked = tuple[Prometheus, FakePrometheus, Clock]


def asked(clock: Clock | None = None, **connection: Any) -> Asked:
    clock = clock or Clock()
    fake = FakePrometheus(clock.of_prometheus)
    settings = Connection(**{"url": "http://prometheus:9090", **connection})
    return Prometheus(settings, clock=clock, transport=fake.transport), fake, clock


async def one(prometheus: Prometheus, *, created_at: float = 0.0, namespace: str = NAMESPACE) -> Sample | ScrapeFailure:
    return (await prometheus.samples(namespace, {POD: created_at}, {}))[POD]


async def why(prometheus: Prometheus, **how: Any) -> str:
    found = await one(prometheus, **how)
    assert isinstance(found, ScrapeFailure), found
    return found.reason


async def test_stored_sample_equals_pod_sample() -> None:
    prometheus, fake, _ = asked()
    fake.scrape(exposed(make_sample(NOW - 20)), at=NOW - 20)
    fake.scrape(exposed(make_sample(NOW - 5)), at=NOW - 5)
    assert await one(prometheus) == make_sample(NOW - 5)


async def test_a_sample_is_dated_by_the_operators_clock() -> None:
    prometheus, fake, clock = asked(Clock(ahead=3600.0))
    fake.scrape(exposed(make_sample(50.0)), at=clock.of_prometheus() - 5)
    found = await one(prometheus, created_at=NOW - 100)
    assert isinstance(found, Sample)
    assert found.at == pytest.approx(NOW - 5, abs=0.01)


async def test_a_scrape_that_is_looked_at_twice_has_one_date() -> None:
    prometheus, fake, clock = asked(Clock(ahead=30.0))
    fake.scrape(exposed(make_sample(50.0)), at=clock.of_prometheus() - 5)
    dates = set()
    for drift in (0.0, 0.2, -0.3, 0.1):
        clock.ahead = 30.0 + drift
        found = await one(prometheus)
        assert isinstance(found, Sample)
        dates.add(found.at)
    assert len(dates) == 1


async def test_another_pod_of_the_same_name_is_not_taken_for_this_one() -> None:
    prometheus, fake, _ = asked()
    fake.scrape(exposed(make_sample(9.0)), at=NOW - 20, target={"instance": "10.0.0.9:8000"})
    said = await why(prometheus, created_at=NOW - 10)
    assert said == (
        "Prometheus: no scrape of pod m-g0-0 in the last 45 s (is it a target, with its name in label pod?)"
    )
    fake.scrape(exposed(make_sample(1.0)), at=NOW - 1, target={"instance": "10.0.0.7:8000"})
    assert await one(prometheus, created_at=NOW - 10) == replace(make_sample(1.0), at=NOW - 1)


async def test_labels_select_targets_within_namespace() -> None:
    prometheus, fake, _ = asked()
    for job in ("engines", "annotated"):
        fake.scrape(exposed(make_sample(NOW)), at=NOW, target={"job": job})
    fake.scrape(exposed(make_sample(1.0)), at=NOW, target={"namespace": "theirs"})
    found = (await prometheus.samples(NAMESPACE, {POD: 0.0}, {}))[POD]
    assert isinstance(found, ScrapeFailure)
    assert found.kind is Reason.METRICS_DUPLICATED
    assert "(instance=10.0.0.1:8000, job=annotated)" in found.reason
    chosen = await prometheus.samples(NAMESPACE, {POD: 0.0}, {"job": "engines", "namespace": "theirs"})
    assert chosen[POD] == make_sample(NOW)


async def test_many_pods_are_asked_for_in_parts() -> None:
    prometheus, fake, _ = asked()
    pods = [f"m-g{n}-0" for n in range(20)]
    for pod in pods:
        fake.scrape(exposed(make_sample(NOW)), at=NOW, pod=pod)
    found = await prometheus.samples(NAMESPACE, dict.fromkeys(pods, 0.0), {})
    assert all(found[pod] == make_sample(NOW) for pod in pods)
    assert len([query for query in fake.queries if query != "time()"]) == 3


async def test_an_answer_that_is_too_large_is_asked_for_by_halves() -> None:
    prometheus, fake, _ = asked()
    pods = [f"m-g{n}-0" for n in range(4)]
    filling = [("vllm:num_preemptions_total", {"engine": f"{n}", "model_name": "x" * 900}, 1.0) for n in range(3000)]
    for pod in pods:
        fake.scrape([*exposed(make_sample(NOW)), *filling], at=NOW, pod=pod)
    found = await prometheus.samples(NAMESPACE, dict.fromkeys(pods, 0.0), {})
    assert all(isinstance(found[pod], Sample) for pod in pods)


# --- what fails -------------------------------------------------------------------------------------------------------


async def test_unreachable_server_is_not_queried_for_a_while() -> None:
    prometheus, fake, clock = asked()
    fake.answer = refused
    assert await why(prometheus) == "Prometheus at http://prometheus:9090: ConnectError: refused"
    before = len(fake.requests)
    await why(prometheus, namespace="another")
    assert len(fake.requests) == before  # no further query
    fake.answer = None
    fake.scrape(exposed(make_sample(NOW)), at=NOW)
    clock.now += FAILURE_BACKOFF_SECONDS + 1
    assert isinstance(await one(prometheus), Sample)


def refused(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def with_status(status: int, body: bytes = b"") -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(status, content=body)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (with_status(401), "it rejects the operator's credentials (status 401)"),
        (with_status(403), "it rejects the operator's credentials (status 403)"),
        (with_status(302), "it responds with status 302"),
        (with_status(404), "it responds with status 404"),
        (with_status(500), "it responds with status 500"),
        (with_status(200, b"<html>"), "the response is not JSON"),
        (with_status(200, b'{"status":' + b"[" * 100_000), "the response is not JSON"),
        (
            with_status(422, b'{"status":"error","errorType":"execution","error":"too many"}'),
            "it rejects the query: execution: ",
        ),
        (
            with_status(503, b'{"status":"error","errorType":"unavailable","error":"x"}'),
            "it rejects the query: unavailable: x",
        ),
    ],
)
async def test_a_failure_is_said_in_words_and_is_nobodys_sample(
    answer: Callable[[httpx.Request], httpx.Response], said: str
) -> None:
    prometheus, fake, _ = asked()
    fake.answer = answer
    found = await one(prometheus)
    assert isinstance(found, ScrapeFailure)
    assert found.kind is Reason.PROMETHEUS_UNAVAILABLE
    assert said in found.reason


async def test_failing_namespace_does_not_affect_others() -> None:
    prometheus, fake, _ = asked()
    fake.answer = lambda request: (
        httpx.Response(200, content=b" " * (MAX_ANSWER_BYTES + 1))
        if b"query=time" not in request.content
        else fake_time()
    )
    assert "larger than" in await why(prometheus, namespace="greedy")
    fake.answer = None
    fake.scrape(exposed(make_sample(NOW)), at=NOW)
    assert isinstance(await one(prometheus), Sample)
    assert "larger than" in await why(prometheus, namespace="greedy")


async def test_response_with_too_many_scrapes_is_rejected() -> None:
    prometheus, fake, _ = asked()
    samples = ",".join(f'[{at},"1"]' for at in range(2000))
    series = f'{{"metric":{{"__name__":"vllm:num_requests_running","pod":"{POD}"}},"values":[{samples}]}}'
    body = f'{{"status":"success","data":{{"resultType":"matrix","result":[{series}]}}}}'
    fake.answer = lambda request: fake_time() if b"query=time" in request.content else httpx.Response(200, content=body)
    assert "2,000 samples of one series" in await why(prometheus)


def fake_time() -> httpx.Response:
    body = {"status": "success", "data": {"resultType": "scalar", "result": [NOW, str(NOW)]}}
    return httpx.Response(200, json=body)


# --- credentials ------------------------------------------------------------------------------------------------------


async def test_a_token_is_read_anew_each_time(tmp_path: Path) -> None:
    token = tmp_path / "token"
    prometheus, fake, _ = asked(url="https://prometheus:9090", token_file=token)
    for text in ("one", "two\n"):
        token.write_text(text)
        await one(prometheus)
        assert fake.requests[-1].headers["Authorization"] == f"Bearer {text.strip()}"


async def test_basic_authentication_is_sent(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("gehe im\n")
    prometheus, fake, _ = asked(url="https://prometheus:9090", username="trimtab", password_file=tmp_path / "password")
    await one(prometheus)
    kind, sent = fake.requests[-1].headers["Authorization"].split()
    assert (kind, base64.b64decode(sent)) == ("Basic", b"trimtab:gehe im")


@pytest.mark.parametrize("text", [None, "", "a\nb", "\x00", "ü"])
async def test_credentials_that_cannot_be_sent_are_said_without_their_text(tmp_path: Path, text: str | None) -> None:
    token = tmp_path / "token"
    if text is not None:
        token.write_text(text)
    prometheus, fake, _ = asked(url="https://prometheus:9090", token_file=token)
    assert f"the operator's {token} " in await why(prometheus)
    assert not fake.requests


async def test_a_redirect_does_not_carry_the_token_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    prometheus, fake, _ = asked(url="https://prometheus:9090", token_file=tmp_path / "token")
    fake.answer = lambda _: httpx.Response(307, headers={"Location": "http://elsewhere/"})
    assert "status 307" in await why(prometheus)
    assert {request.url.host for request in fake.requests} == {"prometheus"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"url": "prometheus:9090"}, "--prometheus-url: not a valid address ('prometheus:9090')"),
    ({"url": "file:///etc/passwd"}, "not a valid address"),
    ({"url": "http://user:secret@prometheus"}, "contains more than an address"),
    ({"url": "http://prometheus/?a=b"}, "contains more than an address"),
    ({"token_file": Path("t")}, "credentials would be sent unencrypted"),
    ({"username": "u", "password_file": Path("p")}, "credentials would be sent unencrypted"),
    ({"url": "https://p", "username": "u"}, "set both or none"),
    ({"url": "https://p", "username": "a:b", "password_file": Path("p")}, "must not contain a colon"),
    ({"url": "https://p", "token_file": Path("t"), "username": "u", "password_file": Path("p")}, "mutually exclusive"),
    ({"ca_file": Path("ca")}, "--prometheus-ca-file: unused with http"),
    ({"url": "https://p", "ca_file": Path("ca"), "is_insecure": True}, "remove one of them"),
    ({"scrape_seconds": 0.0}, "must be 1 to 300"),
    ({"naming": PrometheusNaming(pod="po-d")}, "--prometheus-pod-label: not a valid label name ('po-d')"),
    (
        {"naming": PrometheusNaming(matchers={"__name__": "x"})},
        "--prometheus-match: not a valid label name ('__name__')",
    ),
    ({"naming": PrometheusNaming(aliases={"a": 'x"}'})}, "not valid metric names"),
]


@pytest.mark.parametrize(("flags", "said"), WRONG)
def test_flags_that_cannot_be_are_refused_by_name(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfiguredOperator, match="--prometheus") as caught:
        Connection(**{"url": "http://prometheus", **flags})
    assert said in str(caught.value)


def test_credentials_in_clear_are_sent_where_that_is_asked_for() -> None:
    Connection("http://prometheus", token_file=Path("t"), is_insecure=True)
    Connection("http://127.0.0.1:9090", token_file=Path("t"))


def test_a_ca_that_cannot_be_read_is_said_at_start(tmp_path: Path) -> None:
    with pytest.raises(MisconfiguredOperator, match=r"--prometheus-ca-file: .* cannot be read"):
        Prometheus(Connection("https://p", ca_file=tmp_path / "ca.crt"))


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def tls_server(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """Start a loopback server with a certificate signed by its own CA. Return its address and the CA."""
    made = issue(["localhost"], now=datetime.now(UTC))
    for name, text in (("ca.crt", made.ca), ("tls.crt", made.leaf), ("tls.key", made.key)):
        (tmp_path / name).write_bytes(text)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")

    async def answer(request: web.Request) -> web.Response:
        form = await request.post()
        kind, result = ("scalar", [NOW, "1"]) if form["query"] == "time()" else ("matrix", [])
        return web.json_response({"status": "success", "data": {"resultType": kind, "result": result}})

    application = web.Application()
    application.router.add_post("/prefix/api/v1/query", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "localhost", 0, ssl_context=context).start()
    yield f"https://localhost:{runner.addresses[0][1]}/prefix/", tmp_path / "ca.crt"
    await runner.cleanup()


async def test_a_certificate_must_be_signed_by_the_ca_unless_that_is_waived(tls_server: tuple[str, Path]) -> None:
    url, ca = tls_server
    said = []
    for flags in ({"ca_file": ca}, {"is_insecure": True}, {}):
        async with Prometheus(Connection(url, **flags), clock=lambda: NOW) as prometheus:
            said.append(await why(prometheus))
    assert ["no scrape of pod" in text for text in said] == [True, True, False]
    assert "CERTIFICATE_VERIFY_FAILED" in said[2]


async def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab_operator.engines.prometheus.DEADLINE_SECONDS", 0.1)

    released = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    application = web.Application()
    application.router.add_post("/api/v1/query", hang)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with Prometheus(Connection(url)) as prometheus:
            assert await why(prometheus) == f"Prometheus at {url}: no response within 0.1 s"
    finally:
        released.set()
        await runner.cleanup()
