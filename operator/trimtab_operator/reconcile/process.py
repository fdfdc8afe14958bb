"""Operator process with four event loops, each in its own thread.

The main thread runs Kopf and the reconcile loops, only while this process holds the Lease. The Lease and the probes
have their own thread, event loop and connections, and so does the webhook: neither a burst of edits nor a burst of
admission reviews, whose port is not authenticated, delays the Lease. The board is served from the fourth thread, only
by the leader. A process that loses the Lease exits, and its pod restarts with clean state.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import kopf

from trimtab_operator.board.server import serve_board
from trimtab_operator.builders.admin_token import FORMER_KEY, SECRET_KEY, new_secret
from trimtab_operator.engines import http as bounded_http
from trimtab_operator.engines.prometheus import Connection, Prometheus
from trimtab_operator.errors import MisconfiguredOperator
from trimtab_operator.kube import watches
from trimtab_operator.kube.client import API_ERRORS, Cluster
from trimtab_operator.kube.informer_cache import Cache
from trimtab_operator.kube.leader_election import CONNECTION_ERRORS, LeaderLease
from trimtab_operator.kube.nodes import Nodes
from trimtab_operator.kube.server_clock import ServerClock
from trimtab_operator.kube.webhook import Webhook
from trimtab_operator.reconcile.executor import Executor
from trimtab_operator.reconcile.gc_tuning import collect_garbage_when_idle
from trimtab_operator.reconcile.gpu_claims import GpuClaims
from trimtab_operator.reconcile.health import Heartbeats, OperatorMetrics, measure_lag, serve_health, serve_metrics
from trimtab_operator.reconcile.kopf_handlers import ReconcileLoops, build_registry, build_settings
from trimtab_operator.reconcile.loop_thread import LoopThread
from trimtab_operator.reconcile.observer import ClusterObserver
from trimtab_operator.reconcile.reconciler import Reconciler
from trimtab_operator.reconcile.work_queue import WorkQueue
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.spec import KIND

logger = logging.getLogger(__name__)

MAX_TICK_AGE_SECONDS = 300.0  # an older heartbeat is a stuck loop: two tick deadlines and a back-off
MAX_BLOCKED_SECONDS = 30.0  # a leader with a blocked event loop stops renewing: ADR-0004


@dataclass(frozen=True, slots=True)
class Options:
    """Flags of `trimtab-operator run`."""

    namespaces: tuple[str, ...]
    operator_namespace: str
    identity: str
    tick_seconds: float
    default_image: str | None
    lease_name: str
    secret_name: str
    webhook_port: int
    webhook_config_name: str | None
    webhook_secret_name: str
    service_name: str
    liveness_port: int
    metrics_port: int
    board_port: int
    installation: Installation
    prometheus: Connection | None = None


async def run_operator(options: Options) -> int:
    """Run until stopped. Return 0 after a stop signal, 1 if the Lease is lost or a component ends.

    Raises:
        MisconfiguredOperator: The CRD is missing or the API server is unreachable.
    """
    stop = asyncio.Event()
    _handle_signals(stop)
    heartbeats = Heartbeats(max_age_seconds=max(MAX_TICK_AGE_SECONDS, 4 * options.tick_seconds))
    metrics = OperatorMetrics()
    async with AsyncExitStack() as stack:
        clock = ServerClock()
        metrics.clock_skew.set_function(lambda: clock.skew_seconds)
        cluster = await stack.enter_async_context(_cluster(metrics, clock))
        deadline_thread = await stack.enter_async_context(LoopThread("deadline"))
        deadline_cluster = await deadline_thread.enter(_cluster(metrics))
        webhook_thread = await stack.enter_async_context(LoopThread("webhook"))
        webhook = None
        if options.webhook_port != 0:
            webhook = _webhook(await webhook_thread.enter(_cluster(metrics)), options, metrics)
            metrics.certificate_expiry.set_function(lambda: webhook.expires_at)
        health = await deadline_thread.run(
            serve_health, options.liveness_port, heartbeats, is_ready=lambda: webhook is None or webhook.is_serving
        )
        stack.push_async_callback(deadline_thread.run, health.cleanup)
        pages = await deadline_thread.run(serve_metrics, options.metrics_port, metrics)
        stack.push_async_callback(deadline_thread.run, pages.cleanup)
        await _require_crd(cluster)
        background = [measure_lag(heartbeats, metrics)]
        if webhook is not None:
            server = await webhook_thread.run(webhook.start, options.webhook_port)
            stack.push_async_callback(webhook_thread.run, server.cleanup)
            background.append(webhook_thread.run(webhook.maintain))
        async with _BackgroundTasks(background):
            leadership = Leadership(deadline_thread, _lease(deadline_cluster, options, heartbeats))
            code = await _lead(cluster, leadership, options, heartbeats, metrics, clock, stop)
            if webhook is not None:
                await webhook_thread.run(webhook.withdraw)
            return code


def _handle_signals(stop: asyncio.Event) -> None:
    """Set `stop` on SIGTERM and SIGINT."""
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)


class Leadership:
    """Lease that is acquired, renewed and released in the deadline thread."""

    def __init__(self, deadline_thread: LoopThread, lease: LeaderLease) -> None:
        self.lease = lease
        self._deadline_thread = deadline_thread
        self._keeping: asyncio.Task[None] | None = None

    async def acquire(self, stop: asyncio.Event) -> bool:
        """Wait until the Lease is held, and renew it from then on. Return False if stopped first."""
        if await _finishes_before(self._deadline_thread.run(self._acquire), stop):
            return True
        await self.release()  # it may just have been acquired
        return False

    async def wait_until_lost(self) -> None:
        """Wait until the Lease is no longer held."""
        await self._deadline_thread.run(self._lost)

    async def release(self) -> None:
        """Stop renewing and release the Lease."""
        await self._deadline_thread.run(self._release)

    async def _acquire(self) -> None:
        await self.lease.acquire()
        self._keeping = asyncio.create_task(self.lease.renew_until_lost(), name="lease")

    async def _lost(self) -> None:
        assert self._keeping is not None
        await asyncio.wait({self._keeping})

    async def _release(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        await self.lease.release()


def _lease(deadline_cluster: Cluster, options: Options, heartbeats: Heartbeats) -> LeaderLease:
    return LeaderLease(
        deadline_cluster,
        namespace=options.operator_namespace,
        name=options.lease_name,
        identity=options.identity,
        may_renew=lambda: heartbeats.has_run_within(MAX_BLOCKED_SECONDS),
    )


def _cluster(metrics: OperatorMetrics, clock: ServerClock | None = None) -> Cluster:
    """Return a connection whose requests are measured, and whose answers set `clock`."""

    def on_response(method: str, status: int, seconds: float, date: str | None) -> None:
        metrics.api_requests.labels(method=method, code=str(status)).observe(seconds)
        if clock is not None:
            clock.observe(date)

    cluster = Cluster()
    cluster.on_response = on_response
    return cluster


def _webhook(cluster: Cluster, options: Options, metrics: OperatorMetrics) -> Webhook:
    return Webhook(
        cluster,
        Nodes(cluster),
        namespace=options.operator_namespace,
        service=options.service_name,
        secret=options.webhook_secret_name,
        state_secret=options.secret_name,
        configuration=options.webhook_config_name,
        default_image=options.default_image,
        allowed_privileges=options.installation.allowed_privileges,
        has_router=options.installation.router is not None,
        operator_class=options.installation.operator_class,
        on_review=lambda verdict, seconds: metrics.webhook_reviews.labels(verdict=verdict).observe(seconds),
    )


async def _require_crd(cluster: Cluster) -> None:
    """Check that the CRD is installed: Kopf would wait silently without it. The pod restarts until it is.

    Raises:
        MisconfiguredOperator: The CRD is missing or the API server is unreachable.
    """
    try:
        await cluster.list(KIND, None)
    except CONNECTION_ERRORS as error:
        status = getattr(error, "status", None)
        if status == 404:
            raise MisconfiguredOperator(
                f"the CRD of {KIND} is not installed; apply crds/trimtab.dev_inferencedeployments.yaml"
            ) from error
        if not isinstance(error, API_ERRORS):
            raise MisconfiguredOperator(f"the API server cannot be reached: {error}") from error


async def _lead(
    cluster: Cluster,
    leadership: Leadership,
    options: Options,
    heartbeats: Heartbeats,
    metrics: OperatorMetrics,
    clock: ServerClock,
    stop: asyncio.Event,
) -> int:
    """Wait for the Lease, run while it is held, then release it."""
    if not await leadership.acquire(stop):
        return 0
    logger.info("leading", extra={"identity": options.identity})
    metrics.leader.set(1)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(bounded_http.new_client())
        secret = await cluster.get_or_create_secret(
            options.operator_namespace, options.secret_name, {SECRET_KEY: new_secret()}
        )
        is_leading = cluster.may_write = lambda: leadership.lease.is_held
        work_queue = WorkQueue()
        cache = cluster.cache = watches.build_cache(options.namespaces, work_queue.enqueue)
        for kind in {store.kind for store in cache.stores if store.expires}:
            metrics.watch_age.labels(kind=kind).set_function(partial(cache.age_of, kind))
        budget = options.installation.gpu_budget
        observer = ClusterObserver(
            cluster,
            Nodes(cluster),
            secret[SECRET_KEY],
            options.default_image,
            options.tick_seconds,
            clock,
            former_secret=secret.get(FORMER_KEY) or None,
            installation=options.installation,
            prometheus=None
            if options.prometheus is None
            else await stack.enter_async_context(Prometheus(options.prometheus, clock=clock)),
            cache=cache,
            gpu_claims=None if budget is None else GpuClaims(budget, work_queue.enqueue, cache),
        )
        executor = Executor(cluster, metrics, observer.clock, is_leading)
        reconciler = Reconciler(observer, executor, http, heartbeats, work_queue)
        if options.board_port != 0:
            board_thread = await stack.enter_async_context(LoopThread("board"))
            board = await board_thread.run(serve_board, options.board_port, reconciler.recorder, observer.clock)
            if board is not None:
                stack.push_async_callback(board_thread.run, board.cleanup)
        background = [
            watches.run_watches(cluster, cache),
            collect_garbage_when_idle(lambda: reconciler.has_urgent_work),
        ]
        await stack.enter_async_context(_BackgroundTasks(background))
        code = await _work(leadership, reconciler, cache, options, stop)
    metrics.leader.set(0)
    await leadership.release()
    return code


async def _work(
    leadership: Leadership, reconciler: Reconciler, cache: Cache, options: Options, stop: asyncio.Event
) -> int:
    """Run Kopf. Return 0 after a stop, 1 if the Lease is lost or Kopf ends by itself."""
    operator = asyncio.create_task(_run_loops(reconciler, cache, options, stop), name="kopf")
    keeper = asyncio.create_task(leadership.wait_until_lost(), name="lease")
    stopper = asyncio.create_task(stop.wait(), name="stop")
    done, _ = await asyncio.wait({operator, keeper, stopper}, return_when=asyncio.FIRST_COMPLETED)
    if keeper in done:
        logger.error("leadership lost; exiting so that the pod restarts with clean state")
    elif operator in done and stopper not in done:
        error = operator.exception()
        logger.error("the operator's watches ended", exc_info=error)
    stop.set()
    for task in (keeper, stopper):
        task.cancel()
    await asyncio.gather(operator, keeper, stopper, return_exceptions=True)
    is_clean = keeper not in done and not operator.cancelled() and operator.exception() is None
    return 0 if is_clean else 1


async def _run_loops(reconciler: Reconciler, cache: Cache, options: Options, stop: asyncio.Event) -> None:
    """Run Kopf and the reconcile loops after the children are listed. Otherwise each loop would list its own
    children.
    """
    if not await _finishes_before(watches.wait_for_first_sync(cache), stop):
        return
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=build_registry(ReconcileLoops(reconciler), cache, operator_class=options.installation.operator_class),
        settings=build_settings(),
        standalone=True,
        clusterwide=not options.namespaces,
        namespaces=options.namespaces,
        stop_flag=stop,
    )
    _handle_signals(
        stop
    )  # Kopf replaced them. Its stop flag ends it at once, since it has no task of its own to finish
    await kopf.run_tasks(tasks, ignored=others)


async def _finishes_before(awaited: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """Wait for a coroutine or for `stop`. Return True if the coroutine finished first."""
    work = asyncio.create_task(awaited)
    stopper = asyncio.create_task(stop.wait())
    await asyncio.wait({work, stopper}, return_when=asyncio.FIRST_COMPLETED)
    stopper.cancel()
    if work.done():
        await work
        return True
    work.cancel()
    return False


class _BackgroundTasks:
    """Background coroutines that run for the duration of a context and are cancelled at its end."""

    def __init__(self, coroutines: list[Coroutine[None, None, None]]) -> None:
        self._tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
