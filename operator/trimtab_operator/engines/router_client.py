"""Long polls of the router pods of one resource: their demand, and the token with which they read engines.

One task per running router pod keeps `GET /admin/v1/demand` open, so that the first held request reaches the operator
at once although routers have no permission to write. The state token is pushed after each start of a pod, because
routers keep it in memory only. Responses are untrusted. docs/reference/contract.md, section 9.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimtab_operator.builders.admin_token import Tokens, router_token, state_token, token_hash
from trimtab_operator.engines.http import Reply, Unreachable, fetch, pod_url
from trimtab_operator.observed.router import RouterReport, RouterTarget

logger = logging.getLogger(__name__)

WAIT_SECONDS = 10.0  # a third of observed.router.FRESH_SECONDS, so that one lost response does not matter
HELD_WAIT_SECONDS = 1.0  # while requests wait for the first replica: their number decides how many start
NO_SEQUENCE = -1  # answered at once
TIMEOUT_MARGIN_SECONDS = 5.0  # after the wait, until the router counts as silent
BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0)  # between failing requests
MIN_INTERVAL_SECONDS = 0.1  # between two responses: a router with a stream of held requests answers each at once
MAX_RESPONSE_BYTES = 1 << 16

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Demand(BaseModel):
    """Response of `GET /admin/v1/demand`. Unknown fields are ignored, wrong types are not."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    sequence: Count
    held: Count
    in_flight: Count
    arrived: Count
    oldest_held_seconds: Seconds = 0.0
    last_arrival_seconds_ago: Seconds | None = None


@dataclass(frozen=True, slots=True)
class RouterClient:
    """Client of the admin port of one router pod. Failures are returned, not raised."""

    http: aiohttp.ClientSession
    base_url: str
    token: str

    async def put_state_token(self, token: str, former: str | None) -> Unreachable | None:
        """Set the token with which the router reads the state of engines. None if the router accepted it."""
        body = {"token": token, "former_token": former}
        reply = await self._call("PUT", "/admin/v1/state-token", json=body)
        if isinstance(reply, Unreachable):
            return reply
        return None if reply.status in (200, 204) else Unreachable(f"the router responded with status {reply.status}")

    async def demand(self, since: int, wait_seconds: float) -> _Demand | Unreachable:
        """Return the demand: at once if its sequence is above `since` or a first request is held, else after the
        wait.
        """
        path = f"/admin/v1/demand?since={since}&wait={wait_seconds:g}"
        reply = await self._call("GET", path, deadline_seconds=wait_seconds + TIMEOUT_MARGIN_SECONDS)
        if isinstance(reply, Unreachable):
            return reply
        if reply.status != 200:
            return Unreachable(f"the router responded with status {reply.status}")
        try:
            return _Demand.model_validate_json(reply.body)
        except ValidationError:
            return Unreachable("the router's response violates docs/reference/contract.md")

    async def _call(
        self, method: str, path: str, *, json: object = None, deadline_seconds: float = TIMEOUT_MARGIN_SECONDS
    ) -> Reply | Unreachable:
        return await fetch(
            self.http,
            method,
            self.base_url + path,
            headers={"Authorization": f"Bearer {self.token}"},
            json=json,
            deadline_seconds=deadline_seconds,
            max_bytes=MAX_RESPONSE_BYTES,
        )


class RouterPoller:
    """Long polls of one resource's router pods. `enqueue` is called when a first request waits for a replica."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        clock: Callable[[], float],
        enqueue: Callable[[], None],
        *,
        may_write: Callable[[], bool] = lambda: True,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._http = http
        self._clock = clock
        self._enqueue = enqueue
        self._may_write = may_write
        self._wait_seconds = wait_seconds
        self._tasks: dict[RouterTarget, asyncio.Task[None]] = {}
        self._reports: dict[str, RouterReport] = {}
        self._has_replica = True

    def follow(
        self, targets: Iterable[RouterTarget], tokens: Tokens, *, has_replica: bool
    ) -> Mapping[str, RouterReport]:
        """Poll these pods from now on, and no others. Return their last reports by the pods' uids.

        While a replica serves (`has_replica`), held requests wait for its next free step and need no reconcile.
        """
        wanted = set(targets)
        self._has_replica = has_replica
        for target in self._tasks.keys() - wanted:
            self._tasks.pop(target).cancel()
        for target in wanted - self._tasks.keys():
            self._tasks[target] = asyncio.create_task(self._poll(target, tokens), name=f"router {target.pod}")
        instances = {target.instance for target in wanted}
        self._reports = {instance: report for instance, report in self._reports.items() if instance in instances}
        return dict(self._reports)

    def close(self) -> None:
        """Cancel all polls."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _poll(self, target: RouterTarget, tokens: Tokens) -> None:
        client = RouterClient(self._http, pod_url(target.address, target.port), _token_for(target, tokens))
        former = None if tokens.former is None else state_token(tokens.former)
        failures, since, has_token = 0, NO_SEQUENCE, False
        while True:
            found: _Demand | Unreachable | None = None
            try:
                if not has_token and self._may_write():
                    refused = await client.put_state_token(state_token(tokens.present), former)
                    has_token = refused is None
                found = await client.demand(since, self._wait_for(target))
            except Exception:  # a response of a pod must not end its polls
                logger.exception("a router's response could not be processed", extra={"pod": target.pod})
            if isinstance(found, _Demand):
                self._receive(target, found)
                failures, since = 0, found.sequence
                await asyncio.sleep(MIN_INTERVAL_SECONDS)
                continue
            if failures == 0 and isinstance(found, Unreachable):
                logger.info("a router does not report its demand", extra={"pod": target.pod, "error": found.message})
            since, has_token = NO_SEQUENCE, False  # it may have restarted
            await asyncio.sleep(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)])
            failures += 1

    def _wait_for(self, target: RouterTarget) -> float:
        report = self._reports.get(target.instance)
        is_waited_for = report is not None and report.held > 0 and not self._has_replica
        return min(HELD_WAIT_SECONDS, self._wait_seconds) if is_waited_for else self._wait_seconds

    def _receive(self, target: RouterTarget, demand: _Demand) -> None:
        before = self._reports.get(target.instance)
        self._reports[target.instance] = RouterReport(
            self._clock(),
            held=demand.held,
            in_flight=demand.in_flight,
            arrived=demand.arrived,
            last_arrival_seconds_ago=demand.last_arrival_seconds_ago,
            oldest_held_seconds=demand.oldest_held_seconds,
        )
        if demand.held and (before is None or not before.held) and not self._has_replica:
            self._enqueue()


def _token_for(target: RouterTarget, tokens: Tokens) -> str:
    """Return the admin token of a router pod, which may have been started before a rotation of the secret."""
    if tokens.former is not None and target.token_sha256 == token_hash(router_token(tokens.former)):
        return router_token(tokens.former)
    return router_token(tokens.present)
