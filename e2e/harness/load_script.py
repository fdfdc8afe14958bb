"""Closed-loop load on the completions API, run as a pod inside the cluster: `python load_script.py OPTIONS_JSON`.

It needs only Python and httpx. Every client sends its next request when the last one has ended. With
`requests_per_second` it also sends requests at that rate, each over a new connection and independent of latency, in
turn for each of `tenants`, and `max_requests` in total. With `probes_per_second` it requests the list of models in the
same way. Every 5 s it prints one JSON line `{"live": …}`, and after SIGTERM, or `duration_seconds`, it waits for
running requests and prints `{"summary": …}`. A failed request is counted with its status and body and not retried.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

WINDOW_SECONDS = 5.0
PROBE_TIMEOUT_SECONDS = 60.0
REQUEST_SECONDS = 600.0  # longer requests count as failed
PAUSE_AFTER_FAILURE_SECONDS = 1.0  # so that a failing server is not flooded
TENANT_HEADER = "x-trimtab-tenant"
NOT_THE_ENGINE = "no X-Request-Id, so no engine answered: "
# Each is one token (with its leading space) in most tokenizers.
WORDS = ["river", "stone", "light", "winter", "garden", "music", "letter", "house", "water", "paper", "morning"]


class Load:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.stopping = asyncio.Event()
        self.begin = time.monotonic()
        self.requests: list[dict[str, float]] = []
        self.failures: list[dict[str, Any]] = []
        self.tokens = 0
        self.probed = 0
        self.windows: list[dict[str, float]] = []
        self.first_tokens: dict[str, list[float]] = {}
        """Times of the first tokens by tenant, in the order in which the requests were sent."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.options["url"], timeout=REQUEST_SECONDS, limits=limits) as client:
            reporter = asyncio.create_task(self.report())
            clients = [asyncio.create_task(self.client(client, n)) for n in range(self.options["concurrency"])]
            prober = asyncio.create_task(self.probe_repeatedly(client, self.options.get("probes_per_second", 0.0)))
            sender = asyncio.create_task(self.send_at_rate(client, self.options.get("requests_per_second", 0.0)))
            await asyncio.wait([asyncio.create_task(self.stopping.wait())], timeout=self.options["duration_seconds"])
            self.stopping.set()
            await asyncio.gather(*clients, prober, sender)
            reporter.cancel()
        print(json.dumps({"summary": self.summary()}), flush=True)

    async def client(self, client: httpx.AsyncClient, number: int) -> None:
        choice = random.Random(number)
        await asyncio.sleep(number * self.options.get("stagger_seconds", 0.0))
        while not self.stopping.is_set():
            words = choice.choices(WORDS, k=self.options["prompt_tokens"])
            if not await self.request(client, " ".join(words)):
                await asyncio.sleep(PAUSE_AFTER_FAILURE_SECONDS)
            await self.pause(self.options.get("pause_seconds", 0.0))

    async def send_at_rate(self, client: httpx.AsyncClient, rate: float) -> None:
        """Send requests at a fixed rate, whatever their latency, for each tenant in turn.

        Each is sent completely before the next one, so that they arrive in this order.
        """
        running: list[asyncio.Task[bool]] = []
        begin, choice = time.monotonic(), random.Random(0)
        tenants = self.options.get("tenants") or [""]
        limit = self.options.get("max_requests", 0) or float("inf")
        while rate and len(running) < limit and not self.stopping.is_set():
            tenant = tenants[len(running) % len(tenants)]
            position = len(self.first_tokens.setdefault(tenant, []))
            self.first_tokens[tenant].append(float("nan"))
            prompt = " ".join(choice.choices(WORDS, k=self.options["prompt_tokens"]))
            sent = asyncio.Event()
            sending = self.request(client, prompt, tenant=tenant, position=position, sent=sent)
            running.append(asyncio.create_task(sending))
            await sent.wait()
            await asyncio.sleep(max(0.0, begin + len(running) / rate - time.monotonic()))
        await asyncio.gather(*running)

    async def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the load is stopped."""
        if seconds > 0:
            await asyncio.wait([asyncio.create_task(self.stopping.wait())], timeout=seconds)

    async def probe_repeatedly(self, client: httpx.AsyncClient, rate: float) -> None:
        """Request the list of models at a fixed rate, so that every outage is detected."""
        asking, begin = [], time.monotonic()
        while rate and not self.stopping.is_set():
            asking.append(asyncio.create_task(self.probe(client)))
            await asyncio.sleep(max(0.0, begin + len(asking) / rate - time.monotonic()))
        await asyncio.gather(*asking)

    async def probe(self, client: httpx.AsyncClient) -> None:
        try:
            answer = await client.get("/v1/models", timeout=PROBE_TIMEOUT_SECONDS)
        except httpx.HTTPError as error:
            self.failed(0, f"GET /v1/models: {type(error).__name__}: {error}")
            return
        if answer.status_code != 200:
            self.failed(answer.status_code, f"GET /v1/models: {answer.text}")
        else:
            self.probed += 1

    async def request(
        self,
        client: httpx.AsyncClient,
        prompt: str,
        *,
        tenant: str = "",
        position: int | None = None,
        sent: asyncio.Event | None = None,
    ) -> bool:
        """Stream one completion of exactly `output_tokens`. Set `sent` when it is sent. Return False if it failed."""
        sent = sent or asyncio.Event()
        length = self.options["output_tokens"]
        body = {
            "model": self.options["model"], "prompt": prompt, "stream": True, "temperature": 0.0,
            "max_tokens": length, "min_tokens": length, "stream_options": {"include_usage": True},
        }  # fmt: skip
        content = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        if tenant:
            headers[TENANT_HEADER] = tenant
        begin = time.monotonic()
        first = None
        reason = None
        usage = 0
        status = 0
        try:
            announced = _announced(content, sent)
            async with client.stream("POST", "/v1/completions", content=announced, headers=headers) as answer:
                status = answer.status_code
                if status != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    return self.failed(status, text if "x-request-id" in answer.headers else NOT_THE_ENGINE + text)
                async for line in answer.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        return self.failed(status, line, started=first is not None)
                    for choice in chunk.get("choices", []):
                        first = first or time.monotonic()
                        self.tokens += 1
                        reason = choice.get("finish_reason") or reason
                    usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
        except (httpx.HTTPError, ValueError) as error:
            return self.failed(status, f"{type(error).__name__}: {error}", started=first is not None)
        finally:
            sent.set()
        if reason != "length" or usage != length or first is None:
            return self.failed(
                status, f"ended with finish_reason {reason} after {usage} of {length} tokens", started=first is not None
            )
        end = time.monotonic()
        if position is not None:
            self.first_tokens[tenant][position] = first
        self.requests.append({"end": end - self.begin, "ttft": first - begin, "latency": end - begin, "tokens": usage})
        return True

    def failed(self, status: int, body: str, *, started: bool = False) -> bool:
        at = round(time.monotonic() - self.begin, 1)
        self.failures.append({"at": at, "status": status, "body": body[:500], "started": started})
        return False

    async def report(self) -> None:
        tokens = completed = 0
        while True:
            await asyncio.sleep(WINDOW_SECONDS)
            window = {
                "at": round(time.monotonic() - self.begin, 1),
                "completed": len(self.requests) - completed,
                "chunks": self.tokens - tokens,
                "failed": len(self.failures),
            }
            tokens, completed = self.tokens, len(self.requests)
            self.windows.append(window)
            print(json.dumps({"live": window}), flush=True)

    def summary(self) -> dict[str, Any]:
        return {
            "seconds": round(time.monotonic() - self.begin, 1),
            "completed": len(self.requests),
            "probed": self.probed,
            "failed": self.failures,
            "output_tokens": sum(int(r["tokens"]) for r in self.requests),
            "ttft_seconds": percentiles([r["ttft"] for r in self.requests]),
            "latency_seconds": percentiles([r["latency"] for r in self.requests]),
            "windows": self.windows,
            "overtaken_seconds": max(map(overtaken_seconds, self.first_tokens.values()), default=0.0),
        }


async def _announced(body: bytes, sent: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield a request body, and set `sent` once it is written to the connection."""
    yield body
    sent.set()


def overtaken_seconds(times: list[float]) -> float:
    """Return the longest time by which a request got its first token before an earlier one of the same tenant."""
    latest, longest = 0.0, 0.0
    for at in times:
        if at == at:  # not a failed one
            longest = max(longest, latest - at)
            latest = max(latest, at)
    return round(longest, 3)


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 3) for p in (50, 95, 99)}


if __name__ == "__main__":
    asyncio.run(Load(json.loads(sys.argv[1])).run())
