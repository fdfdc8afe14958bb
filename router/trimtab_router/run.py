"""Runs a router: worker processes, listening sockets, admin port, shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from aiohttp import web
from prometheus_client import disable_created_metrics

from trimtab_router.admin import build_admin_app
from trimtab_router.config import RouterConfig
from trimtab_router.endpoints.endpoint_slices import EndpointSliceSource, in_cluster_url
from trimtab_router.metrics import RouterMetrics
from trimtab_router.proxy.dispatcher import Dispatcher
from trimtab_router.proxy.server import ProxyServer
from trimtab_router.state_stream.client import StateStreams
from trimtab_router.state_stream.registry import Registry
from trimtab_router.workers import Worker, WorkerFleet, follow_first_worker

if TYPE_CHECKING:
    from trimtab_router.endpoint_picker.service import EndpointPicker

ADMIN_SHUTDOWN_SECONDS = 2.0
EXIT_USAGE = 2
GC_OBJECTS = 20_000
"""New objects between collections: requests leave few cycles, and long prompts are many objects."""

logger = logging.getLogger(__name__)


def run_router(config: RouterConfig) -> int:
    """Run the router until SIGTERM and return its exit code."""
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    if config.access_log:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        access = logging.getLogger("trimtab_router.access")
        access.addHandler(handler)
        access.propagate = False
        access.setLevel(logging.INFO)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # half of all samples, which no query uses
    try:
        if config.service is not None:
            in_cluster_url()
        listener = _bind(config)
    except ValueError as error:
        print(f"trimtab-router: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"trimtab-router: port {config.port}: {error}", file=sys.stderr)
        return 1
    config = replace(config, port=listener.getsockname()[1])
    links: list[socket.socket] = []
    for _ in range(1, config.processes):
        own, other = socket.socketpair()
        if os.fork() == 0:
            for inherited in (*links, own, listener):
                inherited.close()
            os._exit(_run_worker(config, _bind(config), (), other))
        other.close()
        links.append(own)
    return _run_worker(config, listener, tuple(links), None)


def _run_worker(
    config: RouterConfig, listener: socket.socket, links: tuple[socket.socket, ...], first: socket.socket | None
) -> int:
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
    try:
        return uvloop.run(_serve(config, listener, links, first))
    except OSError as error:
        print(f"trimtab-router: {error}", file=sys.stderr)
        return 1


async def _serve(
    config: RouterConfig, listener: socket.socket, links: tuple[socket.socket, ...], first: socket.socket | None
) -> int:
    """Serve until the router has drained, and return the exit code.

    Args:
        config: The settings.
        listener: Bound socket of the API port.
        links: In the first worker, the links to the others.
        first: In another worker, the link to the first one.
    """
    registry = Registry(config.served_models)
    streams = StateStreams(registry)
    dispatcher = Dispatcher(config, registry, RouterMetrics())
    server = ProxyServer(config, dispatcher)
    worker = Worker(server, dispatcher)
    tasks = [_start_endpoints(config, server)]
    await server.start(listener)
    picker = await _start_endpoint_picker(config, server)
    runner: web.AppRunner | None = None
    fleet: WorkerFleet | None = None
    if first is None:
        fleet = WorkerFleet(worker, links)
        await fleet.start()
        runner = await _start_admin(config, fleet)
        begin_drain = fleet.begin_drain
        logger.info("listening on port %d, admin port %d", config.port, runner.addresses[0][1])
    else:
        tasks.append(asyncio.create_task(follow_first_worker(worker, first)))
        begin_drain = worker.begin_drain
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, begin_drain)
    await worker.drain_requested.wait()
    logger.info("draining: %d requests in progress", dispatcher.demand.in_flight + dispatcher.num_held)
    await server.drain()
    if picker is not None:
        await picker.stop()
    for task in tasks:
        task.cancel()
    await streams.close()
    if fleet is not None and runner is not None:
        await fleet.all_ended()
        await runner.cleanup()
    return 1 if fleet is not None and fleet.has_failed else 0


async def _start_endpoint_picker(config: RouterConfig, server: ProxyServer) -> EndpointPicker | None:
    if config.endpoint_picker_port is None:
        return None
    from trimtab_router.endpoint_picker.service import EndpointPicker  # its packages are optional

    files = config.endpoint_picker_tls
    certificate = None if files is None else (Path(files[0]).read_bytes(), Path(files[1]).read_bytes())  # noqa: ASYNC240
    picker = EndpointPicker(server.dispatcher, server)
    host = f"[{config.host}]" if ":" in config.host else config.host
    port = await picker.start(f"{host}:{config.endpoint_picker_port}", certificate)
    logger.info("endpoint picker listens on port %d", port)
    return picker


def _start_endpoints(config: RouterConfig, server: ProxyServer) -> asyncio.Task[None]:
    """Start to follow the replicas."""

    def on_endpoints(endpoints: object) -> None:
        server.dispatcher.set_endpoints(endpoints)  # type: ignore[arg-type]
        server.knows_replicas = True

    async def fixed() -> None:
        on_endpoints(config.endpoints)

    if config.service is None:
        return asyncio.create_task(fixed())
    namespace, _, name = config.service.partition("/")
    return asyncio.create_task(EndpointSliceSource(namespace, name, on_endpoints).run())


def _bind(config: RouterConfig) -> socket.socket:
    """Return a bound socket of the API port, which worker processes share."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if config.processes > 1:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    own.bind((config.host, config.port))
    own.setblocking(False)
    return own


async def _start_admin(config: RouterConfig, fleet: WorkerFleet) -> web.AppRunner:
    runner = web.AppRunner(
        build_admin_app(fleet, config.admin_token_sha256), access_log=None, shutdown_timeout=ADMIN_SHUTDOWN_SECONDS
    )
    await runner.setup()
    await web.TCPSite(runner, config.admin_host, config.admin_port).start()
    return runner
