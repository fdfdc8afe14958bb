"""A router in this process, on real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from router_process import Router, engine_in_thread
from stub_upstream import Handler, StubUpstream, answer, until
from trimtab_router.config import RouterConfig
from trimtab_router.metrics import RouterMetrics
from trimtab_router.proxy.dispatcher import Dispatcher
from trimtab_router.proxy.server import ProxyServer
from trimtab_router.state_stream.registry import Registry


@dataclass
class RunningRouter:
    """A router with its replicas."""

    server: ProxyServer
    dispatcher: Dispatcher
    registry: Registry
    metrics: RouterMetrics
    port: int
    upstreams: list[StubUpstream] = field(default_factory=list)

    def set_endpoints(self, *upstreams: StubUpstream) -> None:
        self.dispatcher.set_endpoints([upstream.endpoint for upstream in upstreams])
        self.server.knows_replicas = True

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"trimtab_router_{name}", labels) or 0.0

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition)

    async def held(self, number: int) -> None:
        await self.until(lambda: self.dispatcher.num_held == number)


class RouterFactory:
    """Starts routers and replicas, and stops them after the test."""

    def __init__(self) -> None:
        self._routers: list[RunningRouter] = []
        self._upstreams: list[StubUpstream] = []

    async def upstream(self, handler: Handler = answer, port: int = 0) -> StubUpstream:
        upstream = await StubUpstream(handler, port=port).start()
        self._upstreams.append(upstream)
        return upstream

    async def start(self, *upstreams: StubUpstream, **settings: Any) -> RunningRouter:
        config = RouterConfig(**settings)
        registry, metrics = Registry(config.served_models), RouterMetrics()
        dispatcher = Dispatcher(config, registry, metrics)
        dispatcher.binder._rng.seed(0)
        server = ProxyServer(config, dispatcher)
        own = socket.create_server(("127.0.0.1", 0))
        own.setblocking(False)
        await server.start(own)
        router = RunningRouter(server, dispatcher, registry, metrics, own.getsockname()[1], list(upstreams))
        router.set_endpoints(*upstreams)
        self._routers.append(router)
        return router

    async def stop(self) -> None:
        for router in self._routers:
            await router.server.stop(0.0)
            router.dispatcher.set_endpoints(())
        for upstream in self._upstreams:
            await upstream.stop()
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def routers() -> AsyncIterator[RouterFactory]:
    factory = RouterFactory()
    yield factory
    await factory.stop()


@pytest.fixture
def engine() -> Iterator[int]:
    with engine_in_thread() as port:
        yield port


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Router]]:
    routers: list[Router] = []

    def start_router(*flags: str) -> Router:
        routers.append(Router(tmp_path / f"{len(routers)}.log", *flags))
        return routers[-1]

    yield start_router
    for router in routers:
        router.end()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Use uvloop, as the router does."""
    return {"uvloop": uvloop.new_event_loop}
