"""Client of the tuned engine's admin API: reads and changes values, and detects changes by others."""

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
ADMIN_TIMEOUT_SECONDS = 120.0  # a KV cache that grows by many GiB is mapped on every rank before the response
RESET_TRIES, RESET_PAUSE_SECONDS = 50, 0.1
STALE = 412


class ConcurrentChange(TrimtabError):
    """Another client changed the configuration, so that measurements belong to unknown values. Exit code 1."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Addresses of the engine's two ports, and headers for them."""

    url: str
    admin_url: str
    headers: dict[str, str]
    admin_headers: dict[str, str]


@dataclass(slots=True)
class LiveEngine:
    """An engine whose live values are not changed by others."""

    place: EngineAddress
    generation: int
    desired: dict[str, Any]
    envelope: dict[str, Any]
    fields: dict[str, Any]
    device_bytes: int
    set_last: dict[str, float] = field(default_factory=dict)

    @classmethod
    async def connect(cls, place: EngineAddress) -> "LiveEngine":
        """Read the engine's configuration.

        Raises:
            ConfigError: There is no admin API, or the utilization is not live.
        """
        status, config = await _call(place, "GET", "/admin/v1/config")
        if status != 200:
            raise ConfigError(f"{place.admin_url}/admin/v1/config: HTTP {status}: {_error_text(config)}")
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
                    f"{name} of this engine is {kind}, not live: a flag fixes the KV cache; start the engine without "
                    f"--num-gpu-blocks-override and --kv-cache-memory-bytes"
                )
        return engine

    @property
    def tuned(self) -> dict[str, float]:
        """Values of the three parameters when the engine was first read."""
        return {name: self.desired[name] for name in TUNED}

    async def set(self, values: dict[str, float]) -> str | None:
        """Set the values. Return the reason if the engine rejects them, else None. Raises ChangedMeanwhile,
        EngineDead.
        """
        status, body = await _call(self.place, "PATCH", "/admin/v1/config", values, str(self.generation))
        if status == STALE:
            raise ConcurrentChange(self._change_message(body.get("generation")))
        if status == 422:
            return _error_text(body)
        if status != 200:
            raise EngineDead(f"PATCH {values} at {self.place.admin_url}: HTTP {status}: {_error_text(body)}")
        self.generation, self.set_last = body["generation"], values
        return None

    async def check_unchanged(self) -> None:
        """Raise ChangedMeanwhile if another client has changed the configuration, EngineDead if the engine has
        ended.
        """
        status, config = await _call(self.place, "GET", "/admin/v1/config")
        if status != 200:
            raise EngineDead(f"{self.place.admin_url}/admin/v1/config: HTTP {status}: {_error_text(config)}")
        if config["generation"] != self.generation:
            raise ConcurrentChange(self._change_message(config["generation"]))

    async def reset_prefix_cache(self) -> None:
        """Reset the prefix cache, so that no trial benefits from the previous one.

        Raises:
            ConfigError: The cache stays in use, because other clients send requests.
        """
        for _ in range(RESET_TRIES):
            status, body = await _call(self.place, "POST", "/admin/v1/reset_prefix_cache", {})
            if status == 200:
                return
            await asyncio.sleep(RESET_PAUSE_SECONDS)
        raise ConfigError(
            f"the prefix cache of {self.place.admin_url} stays in use ({_error_text(body)}): other clients send "
            "requests, which would distort the results; use an engine without other clients"
        )

    def _change_message(self, generation: int | None) -> str:
        return (
            f"another client changed the configuration of {self.place.admin_url} (generation {generation}, expected "
            f"{self.generation}); set spec.tuning.mode to Off if an operator tunes it, then repeat the command"
        )


async def _call(
    place: EngineAddress, method: str, path: str, body: dict[str, Any] | None = None, if_match: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Return status and body of an admin call. Raises EngineDead if it cannot be reached."""
    headers = place.admin_headers | ({"If-Match": if_match} if if_match else {})
    try:
        timeout = aiohttp.ClientTimeout(total=ADMIN_TIMEOUT_SECONDS)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.request(method, f"{place.admin_url}{path}", json=body) as answer,
        ):
            decoded = await answer.json(content_type=None)
            return answer.status, decoded if isinstance(decoded, dict) else {"message": str(decoded)}
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise EngineDead(f"cannot reach the admin API at {place.admin_url}: {reason_of(error)}") from None


def _error_text(body: dict[str, Any]) -> str:
    return str(body.get("message") or body)[:300]
