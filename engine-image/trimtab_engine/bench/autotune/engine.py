"""The engine that is tuned, through its admin API: its values, changing them, and noticing who else does."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from trimtab_engine.bench.serving.server import reason_of
from trimtab_engine.errors import ConfigError, EngineDead, TrimtabError

TUNED = ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")
ENVELOPE = (
    "max_num_seqs_cap",
    "max_num_batched_tokens_cap",
    "gpu_memory_utilization_cap",
    "max_model_len",
    "block_size",
)
ASK_SECONDS = 120.0  # a KV cache that grows by many GiB is mapped on every rank before the answer comes
RESET_TRIES, RESET_PAUSE_SECONDS = 50, 0.1
STALE = 412


class ChangedMeanwhile(TrimtabError):
    """Somebody else changed the configuration: what was measured is of no known values. Exit code 1."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the engine's two ports are, and what is sent to them."""

    url: str
    admin_url: str
    headers: dict[str, str]
    admin_headers: dict[str, str]


@dataclass(slots=True)
class LiveEngine:
    """An engine whose live values are changed by nobody else."""

    place: Place
    generation: int
    desired: dict[str, Any]
    envelope: dict[str, Any]
    fields: dict[str, Any]
    device_bytes: int
    set_last: dict[str, float] = field(default_factory=dict)

    @classmethod
    async def look(cls, place: Place) -> "LiveEngine":
        """Read what it is. Raises ConfigError where there is no admin API, or the utilisation is not live."""
        status, config = await _call(place, "GET", "/admin/v1/config")
        if status != 200:
            raise ConfigError(f"{place.admin_url}/admin/v1/config answers {status}: {_words(config)}")
        _, memory = await _call(place, "GET", "/admin/v1/memory")
        engine = cls(
            place,
            config["generation"],
            config["desired"],
            config["envelope"],
            config["fields"],
            int(memory.get("device_bytes") or 0),
        )
        for name in TUNED:
            if (kind := engine.fields[name]["class"]) != "live":
                raise ConfigError(
                    f"{name} of this engine is not live but {kind}: a flag fixes the KV cache. Start it without "
                    f"--num-gpu-blocks-override and --kv-cache-memory-bytes"
                )
        return engine

    @property
    def tuned(self) -> dict[str, float]:
        """Its values of the three knobs as it was looked at."""
        return {name: self.desired[name] for name in TUNED}

    async def set(self, values: dict[str, float]) -> str | None:
        """Change its values. Returns why it refuses; None: they are in force. Raises ChangedMeanwhile, EngineDead."""
        status, body = await _call(self.place, "PATCH", "/admin/v1/config", values, str(self.generation))
        if status == STALE:
            raise ChangedMeanwhile(self._changed(body.get("generation")))
        if status == 422:
            return _words(body)
        if status != 200:
            raise EngineDead(f"PATCH {values} of {self.place.admin_url} answers {status}: {_words(body)}")
        self.generation, self.set_last = body["generation"], values
        return None

    async def check_unchanged(self) -> None:
        """Raise ChangedMeanwhile where somebody changed it since our last change, EngineDead where it is gone."""
        status, config = await _call(self.place, "GET", "/admin/v1/config")
        if status != 200:
            raise EngineDead(f"{self.place.admin_url}/admin/v1/config answers {status}: {_words(config)}")
        if config["generation"] != self.generation:
            raise ChangedMeanwhile(self._changed(config["generation"]))

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that no run profits by the one before it. Raises ConfigError when it stays in use:
        somebody else sends requests."""
        for _ in range(RESET_TRIES):
            status, body = await _call(self.place, "POST", "/admin/v1/reset_prefix_cache", {})
            if status == 200:
                return
            await asyncio.sleep(RESET_PAUSE_SECONDS)
        raise ConfigError(
            f"the prefix cache of {self.place.admin_url} stays in use ({_words(body)}): somebody else sends requests, "
            f"which would be in every figure; tune an engine that serves nobody"
        )

    def _changed(self, generation: int | None) -> str:
        return (
            f"somebody else changed the configuration of {self.place.admin_url} (generation {generation}, ours was "
            f"{self.generation}); set spec.tuning.mode to Off where an operator tunes it, then run the command again"
        )


async def _call(
    place: Place, method: str, path: str, body: dict[str, Any] | None = None, if_match: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Status and body of an admin call. Raises EngineDead when it cannot be reached."""
    headers = place.admin_headers | ({"If-Match": if_match} if if_match else {})
    try:
        timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.request(method, f"{place.admin_url}{path}", json=body) as answer,
        ):
            decoded = await answer.json(content_type=None)
            return answer.status, decoded if isinstance(decoded, dict) else {"message": str(decoded)}
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise EngineDead(f"cannot reach the admin API at {place.admin_url}: {reason_of(error)}") from None


def _words(body: dict[str, Any]) -> str:
    return str(body.get("message") or body)[:300]
