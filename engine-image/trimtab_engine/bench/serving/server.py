"""Requests of the benchmark other than generation: the served model, readiness, counters, profiler."""

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from trimtab_engine.errors import ConfigError

COUNTERS = (
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
READY_POLL_SECONDS = 0.5
REQUEST_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The first model of /v1/models, or the requested one."""

    name: str
    root: str | None
    max_model_len: int | None


async def wait_until_ready(url: str, headers: dict[str, str], timeout: float) -> None:
    """Wait until /health succeeds (a server without it counts as ready). Raises ConfigError after the timeout."""
    deadline = time.monotonic() + timeout
    while (reason := await _not_ready_reason(url, headers)) is not None:
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"{reason}; check the server and --base-url or --port, or wait for it with "
                f"--ready-check-timeout-sec SECONDS"
            )
        await asyncio.sleep(READY_POLL_SECONDS)


async def _not_ready_reason(url: str, headers: dict[str, str]) -> str | None:
    try:
        async with _session(headers) as session, session.get(f"{url}/health") as answer:
            return None if answer.status in (200, 404) else f"{url}/health: HTTP {answer.status}, not ready"
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return f"cannot reach {url}: {reason_of(error)}"


async def served_model(url: str, headers: dict[str, str], name: str | None) -> ServedModel:
    """Return the server's model with this name. Raises ConfigError if there is none."""
    data = (await _get(f"{url}/v1/models", headers)).get("data", [])
    found = [entry for entry in data if name is None or entry.get("id") == name]
    if not found:
        names = ", ".join(entry.get("id", "?") for entry in data) or "none"
        raise ConfigError(f"{url} does not serve the model {name or ''!r}; set --model to one of: {names}")
    return ServedModel(found[0]["id"], found[0].get("root"), found[0].get("max_model_len"))


async def counters(url: str, headers: dict[str, str]) -> dict[str, float]:
    """Return the server's relevant vllm: counters; empty if there are none."""
    try:
        async with _session(headers) as session, session.get(f"{url}/metrics") as answer:
            return parse_counters(await answer.text()) if answer.status == 200 else {}
    except (aiohttp.ClientError, OSError, TimeoutError):
        return {}


def parse_counters(text: str) -> dict[str, float]:
    """Return sums over all labels of the lines `vllm:NAME_total{…} VALUE`."""
    sums: dict[str, float] = {}
    for line in text.split("\n"):  # labels may contain other line separators
        name, _, rest = line.partition("{")
        name = name.removeprefix("vllm:").removesuffix("_total")
        if name in COUNTERS and line.startswith("vllm:"):
            sums[name] = sums.get(name, 0.0) + float(rest.rpartition(" ")[2])
    return sums


def counter_changes(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Return the changes between two scrapes, with rates if the divisor is not zero."""
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    found: dict[str, Any] = {}
    if "num_preemptions" in change:
        found["preemptions"] = int(change["num_preemptions"])
    if change.get("prefix_cache_queries"):
        found["prefix_cache_hit_rate"] = change.get("prefix_cache_hits", 0.0) / change["prefix_cache_queries"]
    if change.get("spec_decode_num_draft_tokens"):
        accepted = change.get("spec_decode_num_accepted_tokens", 0.0)
        found["spec_decode_acceptance_rate"] = 100 * accepted / change["spec_decode_num_draft_tokens"]
        found["spec_decode_acceptance_length"] = 1 + accepted / max(change.get("spec_decode_num_drafts", 0.0), 1.0)
    return found


async def profile(url: str, headers: dict[str, str], action: str) -> None:
    """POST /start_profile or /stop_profile. Raises ConfigError with the server's message."""
    try:
        async with _session(headers) as session, session.post(f"{url}/{action}_profile") as answer:
            text = (await answer.text()).strip()
            if answer.status == 404:
                raise ConfigError(
                    f"no profiler at {url}; start the Trimtab engine with --admin-port PORT --profiler-dir DIR, and "
                    "set --admin-url http://HOST:PORT"
                )
            if answer.status != 200:
                raise ConfigError(f"{url}/{action}_profile: HTTP {answer.status}: {text[:300]}")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ConfigError(f"cannot reach {url}/{action}_profile: {reason_of(error)}") from None


async def _get(url: str, headers: dict[str, str]) -> dict[str, Any]:
    try:
        async with _session(headers) as session, session.get(url) as answer:
            if answer.status != 200:
                raise ConfigError(f"{url}: HTTP {answer.status}: {(await answer.text()).strip()[:300]}")
            body: dict[str, Any] = await answer.json(content_type=None)
            return body
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise ConfigError(f"cannot reach {url}: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """Return the reason of a failed request, with the kernel's text for connection errors."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    if isinstance(error, TimeoutError):
        return f"no response within {REQUEST_TIMEOUT_SECONDS:g} s"
    return str(error) or type(error).__name__


def _session(headers: dict[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS))
