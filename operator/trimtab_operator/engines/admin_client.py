"""Typed client of the engine's admin API (docs/reference/contract.md, section 2). Failures are result types, not
exceptions.

One `EngineClient` calls the admin port of one engine. It does not interpret the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import aiohttp
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trimtab_operator.engines.http import Reply, Unreachable, fetch
from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.actions import LiveValues
from trimtab_operator.observed.engines import ReportedScheduling
from trimtab_operator.planning.scheduling_policy import PER_PROMPT_TOKEN, POLICY, TARGET
from trimtab_operator.tuner.parameters import FieldRange, Parameter, Value, typed
from trimtab_operator.tuner.samples import Config, Ledger

__all__ = [
    "ConfigReport",
    "DrainProgress",
    "EngineClient",
    "Failure",
    "Layout",
    "Loading",
    "MemoryLedger",
    "OutOfBounds",
    "Patched",
    "Rejected",
    "Stale",
    "Unauthorized",
    "Unreachable",
]

ADMIN_TIMEOUT_SECONDS = 15.0  # the engine responds between two steps, which take seconds on a busy CPU
PATCH_TIMEOUT_SECONDS = (
    30.0  # the response is sent after the change is applied: a shrink may move blocks and preempt first
)

Count = Annotated[int, Field(ge=0)]
Number = Annotated[int | float, Field(allow_inf_nan=False)]


def _numbers(values: object) -> object:
    """Return the numeric configuration values, which are the tuning parameters."""
    if not isinstance(values, Mapping):
        return values
    return {name: value for name, value in values.items() if not isinstance(value, bool | str)}


def _texts(values: object) -> object:
    """Return the string configuration values, which are choices."""
    if not isinstance(values, Mapping):
        return values
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _names(values: object) -> tuple[str, ...]:
    """Return the allowed values of a choice. Empty for a switch."""
    return tuple(value for value in values if isinstance(value, str)) if isinstance(values, list) else ()


Values = Annotated[Mapping[str, Number], BeforeValidator(_numbers)]
Texts = Annotated[Mapping[str, str], BeforeValidator(_texts)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class _Wire(BaseModel):
    """Response of an engine. Unknown fields are ignored (a newer engine may send more), wrong types are not."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class FieldReport(_Wire):
    """How a field may be changed. `minimum` and `maximum` are the current bounds if only this field changes; a
    choice has `names`.
    """

    change: Literal["live", "drain", "restart"] = Field(alias="class")
    minimum: Number | None = Field(default=None, alias="min")
    maximum: Number | None = Field(default=None, alias="max")
    names: Names = Field(default=(), alias="values")


class ConfigReport(_Wire):
    """Response of `GET /admin/v1/config`."""

    generation: Annotated[int, Field(ge=1)]
    envelope: Mapping[str, object]
    desired: Values
    applied: Values
    chosen: Texts = Field(alias="applied")
    """The applied values of choices."""
    fields: Mapping[str, FieldReport]

    def for_tuner(self) -> Config:
        """Return the part that the tuner reads."""
        max_model_len = self.envelope.get("max_model_len")
        return Config(
            generation=self.generation,
            applied={knob: typed(knob, self.applied[knob]) for knob in Parameter if knob in self.applied},
            fields={
                knob: FieldRange(report.change == "live", report.minimum, report.maximum)
                for knob in Parameter
                if (report := self.fields.get(knob)) is not None
                and report.minimum is not None
                and report.maximum is not None
            },
            max_model_len=max_model_len if isinstance(max_model_len, int) and max_model_len > 0 else None,
        )

    def queue(self) -> ReportedScheduling:
        """Return the scheduling policy and its parameters."""
        report = self.fields.get(POLICY)
        return ReportedScheduling(
            policy=self.chosen.get(POLICY),
            policies=() if report is None else report.names,
            times={name: float(self.applied[name]) for name in (TARGET, PER_PROMPT_TOKEN) if name in self.applied},
        )


class KvReport(_Wire):
    """KV cache usage in blocks."""

    block_size: Count
    bytes_per_block: Count
    blocks_total: Count
    blocks_used: Count
    blocks_free: Count
    blocks_cap: Count


class MemoryLedger(_Wire):
    """Response of `GET /admin/v1/memory`: device memory by owner."""

    device_bytes: Count
    driver_used_bytes: Count
    kinds: Mapping[str, int]
    unattributed_bytes: int
    kv: KvReport

    def for_tuner(self) -> Ledger:
        """Return the part that the tuner reads."""
        return Ledger(
            device_bytes=self.device_bytes,
            blocks_total=self.kv.blocks_total,
            block_size=self.kv.block_size,
            bytes_per_block=self.kv.bytes_per_block,
            other_bytes=self.kinds.get("other", 0),
            free_bytes=self.kinds.get("free"),
            blocks_cap=self.kv.blocks_cap,
        )


class Layout(_Wire):
    """Response of `GET /admin/v1/layout`: the actual parallel layout."""

    world_size: Annotated[int, Field(ge=1)]
    tensor_parallel_size: Annotated[int, Field(ge=1)]
    pipeline_parallel_size: Annotated[int, Field(ge=1)]
    data_parallel_size: Annotated[int, Field(ge=1)]
    expert_parallel: bool

    def degrees(self) -> Degrees:
        """Return the layout in the form that is compared with the spec."""
        return Degrees(
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            data=self.data_parallel_size,
            expert=self.expert_parallel,
            world_size=self.world_size,
        )


class DrainProgress(_Wire):
    """Response of `POST /admin/v1/drain`: the remaining work."""

    remaining_requests: Count
    remaining_tokens: Count
    eta_seconds: Number | None = None


class Patched(_Wire):
    """Accepted `PATCH /admin/v1/config`. `id` and `applied_at_step` are None after a dry run."""

    id: str | None
    generation: int
    desired: Values
    applied_at_step: int | None


@dataclass(frozen=True, slots=True)
class Unauthorized:
    """401: the engine was started with the hash of another token and must restart with the current one."""

    message: str


@dataclass(frozen=True, slots=True)
class Loading:
    """503: the engine is still loading. It is polled again in the next tick."""

    message: str


@dataclass(frozen=True, slots=True)
class Stale:
    """412: the configuration was changed since it was read. `generation` is the current one."""

    generation: int
    message: str


@dataclass(frozen=True, slots=True)
class OutOfBounds:
    """422: nothing was changed. `nearest` is None if no value is valid."""

    field: str
    value: object
    minimum: Value | None
    maximum: Value | None
    nearest: Value | None
    message: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Other 4xx status: the two sides disagree about the contract."""

    status: int
    message: str


Failure = Unauthorized | Loading | Unreachable | Rejected
T = TypeVar("T", bound=_Wire)


class EngineClient:
    """Client of one engine's admin port."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, token: str) -> None:
        self._http = http
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}

    async def config(self) -> ConfigReport | Failure:
        return await self._get("/admin/v1/config", ConfigReport)

    async def memory(self) -> MemoryLedger | Failure:
        return await self._get("/admin/v1/memory", MemoryLedger)

    async def layout(self) -> Layout | Failure:
        return await self._get("/admin/v1/layout", Layout)

    async def requests(self, after: int | None) -> bytes | Failure:
        """Return the JSON body of the list of requests, which may be large. Requests that finished before `after`
        are left out.
        """
        query = "" if after is None else f"?after={after}"
        reply = await self._call("GET", f"/admin/v1/requests{query}")
        if isinstance(reply, Reply) and reply.status == 200:
            return reply.body
        return _to_failure(reply)

    async def drain(self, deadline_seconds: float) -> DrainProgress | Failure:
        """Stop admitting requests. A repeated call returns the progress."""
        reply = await self._call("POST", "/admin/v1/drain", json={"deadline_seconds": deadline_seconds})
        return _parse(reply, DrainProgress)

    async def patch(
        self, fields: LiveValues, *, if_match: int | None = None, dry_run: bool = False
    ) -> Patched | Stale | OutOfBounds | Failure:
        """Change live fields, all or none. With `if_match`, only if the generation is still that one."""
        path = "/admin/v1/config?dry_run=1" if dry_run else "/admin/v1/config"
        headers = {} if if_match is None else {"If-Match": str(if_match)}
        body = {str(name): value for name, value in fields.items()}
        reply = await self._call("PATCH", path, json=body, headers=headers, deadline_seconds=PATCH_TIMEOUT_SECONDS)
        if isinstance(reply, Reply) and reply.status == 412:
            stale = _read(reply.body, _StaleBody)
            return Stale(stale.generation, stale.message) if stale else _malformed(reply)
        if isinstance(reply, Reply) and reply.status == 422:
            refusal = _read(reply.body, _RefusalBody)
            if refusal is None:
                return _malformed(reply)
            return OutOfBounds(
                refusal.field, refusal.value, refusal.min, refusal.max, _number(refusal.nearest), refusal.message
            )
        return _parse(reply, Patched)

    async def _get(self, path: str, kind: type[T]) -> T | Failure:
        return _parse(await self._call("GET", path), kind)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        headers: Mapping[str, str] | None = None,
        deadline_seconds: float = ADMIN_TIMEOUT_SECONDS,
    ) -> Reply | Unreachable:
        return await fetch(
            self._http,
            method,
            self._base_url + path,
            headers={**self._headers, **(headers or {})},
            json=json,
            deadline_seconds=deadline_seconds,
        )


class _StaleBody(_Wire):
    generation: int
    message: str = ""


class _RefusalBody(_Wire):
    field: str
    value: object = None
    min: Number | None = None
    max: Number | None = None
    nearest: Number | str | None = None
    message: str = ""


class _MessageBody(_Wire):
    message: str


def _parse(reply: Reply | Unreachable, kind: type[T]) -> T | Failure:
    if isinstance(reply, Unreachable):
        return reply
    if reply.status == 200:
        return _read(reply.body, kind) or _malformed(reply)
    return _to_failure(reply)


def _to_failure(reply: Reply | Unreachable) -> Failure:
    """Map an unsuccessful response to a failure."""
    if isinstance(reply, Unreachable):
        return reply
    message = _message(reply)
    if reply.status == 401:
        return Unauthorized(message)
    if reply.status == 503:
        return Loading(message)
    return Unreachable(message) if reply.status >= 500 else Rejected(reply.status, message)


def _read(body: bytes, kind: type[T]) -> T | None:
    try:
        return kind.model_validate_json(body)
    except ValidationError:
        return None


def _malformed(reply: Reply) -> Unreachable:
    return Unreachable(f"the engine's response (status {reply.status}) violates docs/reference/contract.md")


def _message(reply: Reply) -> str:
    """Return the engine's error message, truncated to 500 characters."""
    body = _read(reply.body, _MessageBody)
    return body.message[:500] if body else f"the engine responded with status {reply.status}"


def _number(value: Value | str | None) -> Value | None:
    return None if isinstance(value, str) else value
