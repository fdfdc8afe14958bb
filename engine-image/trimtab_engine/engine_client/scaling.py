"""Live scaling of engine cores (data_parallel_size), run by the first process.

Cores validate the change like any other (config/live/fields.py); this module carries it out. A joining core loads while
others serve, adopts the configuration in force, and serves. The highest ranks retire: they take no new request, finish
running ones, and end. If a core cannot join, the others continue, and the desired size falls back to the number of
serving cores.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.launcher import CoreLauncher
from trimtab_engine.errors import EngineDead
from trimtab_engine.messages.admin import AdminReply, AdoptConfig, Call, GetConfig, GetLayout, PatchConfig, Retire

FIELD = "data_parallel_size"

logger = logging.getLogger("trimtab_engine.api")


class CoreScaling:
    """Answers admin calls about the configuration and the layout as a whole, and applies data_parallel_size."""

    def __init__(self, client: CoreClient, launcher: CoreLauncher, config: EngineConfig) -> None:
        self._client, self._launcher, self._config = client, launcher, config
        self._desired = config.data_parallel_size
        self._changes = asyncio.Lock()  # of the configuration: a core that joins must miss none
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The tasks of the cores that join or retire, by core."""

    async def call(self, call: Call) -> AdminReply:
        """Send one admin call to the engine."""
        match call:
            case GetConfig():
                return self._with_serving_size(await self._client.call(call))
            case PatchConfig():
                return await self._patch(call)
            case GetLayout():
                reply = await self._client.call(call)
                return AdminReply(reply.call_id, reply.status, self._number_world_ranks(reply.body) | self._scaling())
        return await self._client.call(call)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _patch(self, call: PatchConfig) -> AdminReply:
        async with self._changes:
            if self._resizes(call.values) and (reason := self._inactive_reason()) is not None:
                return AdminReply("", 409, {"message": f"the engine {reason}: {FIELD} cannot change now"})
            reply = await self._client.call(call)
        if reply.status == 200 and not call.dry_run:
            self._desired = reply.body.get("desired", {}).get(FIELD, self._desired)
            self._follow()
        return reply

    def _resizes(self, values: object) -> bool:
        return isinstance(values, dict) and values.get(FIELD, self._desired) != self._desired

    def _inactive_reason(self) -> str | None:
        """Return why the engine is inactive, as words for an error. None if it is active. A joining core would be
        active.
        """
        state = self._client.state
        return "sleeps" if state.sleep_level is not None else "is paused" if state.pause_mode is not None else None

    def _with_serving_size(self, reply: AdminReply) -> AdminReply:
        if reply.status == 200 and FIELD in reply.body.get("applied", {}):
            reply.body["applied"][FIELD] = len(self._client.core_registry.serving)
        return reply

    def _number_world_ranks(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return data-parallel ranks as counted over all servers of a world with an external load balancer."""
        first, world = self._config.data_parallel_first_rank, self._config.data_parallel_world_size
        body["data_parallel_size"] = world or len(self._client.core_registry.serving)
        if world is None:
            return body
        per_core = self._config.tensor_parallel_size * self._config.pipeline_parallel_size
        for row in body["ranks"]:
            row |= {"rank": row["rank"] + first * per_core, "data": row["data"] + first}
        return body | {"data_parallel_rank": first}

    def _scaling(self) -> dict[str, Any]:
        """Return the number of serving cores, joining ones with progress, and retiring ones."""
        core_registry = self._client.core_registry
        joining = [(core, self._client.progress_of(core)) for core in core_registry.cores("joining")]
        return {
            "scaling": {
                "desired": self._desired,
                "serving": len(core_registry.serving),
                "joining": [{"data": c, "stage": at.stage, "percent": at.percent} for c, at in joining],
                "retiring": [{"data": core} for core in core_registry.cores("retiring")],
            },
        }

    # --- carrying it out --------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Start missing cores, retire excess ones. Operations in progress are checked again when done."""
        core_registry = self._client.core_registry
        for core in range(self._desired):
            if core_registry[core] == "absent":
                self._start(core, self._join(core))
        for core in core_registry.serving:
            if core >= self._desired:
                self._start(core, self._retire(core))

    def _start(self, core: int, work: Coroutine[Any, Any, None]) -> None:
        if core in self._tasks:
            work.close()
            return
        task = self._tasks[core] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._done(core))

    def _done(self, core: int) -> None:
        task = self._tasks.pop(core)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("engine core %d: %s", core, error)
        elif not task.cancelled() and self._client.is_alive:
            self._follow()

    async def _join(self, core: int) -> None:
        logger.info("engine core %d is starting; %d others serve", core, len(self._client.core_registry.serving))
        try:
            loaded = self._client.expect(core)
            await self._launcher.start_core(core, self._client, joins=True)
            await loaded
            await self._adopt(core)
        except EngineDead as error:
            await self._launcher.end_core(core)
            if self._client.is_alive:
                await self._fall_back(core, error)

    async def _adopt(self, core: int) -> None:
        async with self._changes:
            if core >= self._desired:
                raise EngineDead(f"{FIELD} is {self._desired} by now")
            if (reason := self._inactive_reason()) is not None:
                raise EngineDead(f"the engine {reason} by now")
            config = (await self._client.call(GetConfig())).body
            reply = await self._client.call_one(AdoptConfig(config["desired"], config["generation"]), core)
        if reply.status != 200:
            raise EngineDead(str(reply.body.get("message", reply.body)))
        logger.info("engine core %d serves", core)

    async def _fall_back(self, core: int, error: EngineDead) -> None:
        """Set the desired size to the number of present cores."""
        if core >= self._desired:
            return
        logger.error("engine core %d could not join: %s; %s falls back to %d", core, error, FIELD, core)
        await self._patch(PatchConfig({FIELD: max(1, core)}))

    async def _retire(self, core: int) -> None:
        logger.info("engine core %d retires after its running requests", core)
        await self._client.call_one(Retire(), core)
        await self._launcher.wait_for_end(core)
        logger.info("engine core %d has ended", core)
