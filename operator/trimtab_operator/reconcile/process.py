"""The operator's process: two event loops that we own, each in a thread.

In the main thread Kopf and the reconcile loops do the work, only in the process that holds the Lease. What others wait
for by a deadline, the Lease itself, the webhook and the probes, has a thread, an event loop and connections of its own:
a burst of edits costs neither the Lease nor a verdict. A process that loses the Lease ends, and its pod starts clean.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass

import kopf

from trimtab_operator.builders.admin_token import FORMER_KEY, SECRET_KEY, new_secret
from trimtab_operator.engines import http as bounded_http
from trimtab_operator.engines.prometheus import Connection, Prometheus
from trimtab_operator.errors import MisconfiguredOperator
from trimtab_operator.kube import watches
from trimtab_operator.kube.client import API_ERRORS, Cluster
from trimtab_operator.kube.informer_cache import Cache
from trimtab_operator.kube.leader_election import CONNECTION_ERRORS, LeaderLease
from trimtab_operator.kube.nodes import Nodes
from trimtab_operator.kube.webhook import Webhook
from trimtab_operator.reconcile.executor import Hands
from trimtab_operator.reconcile.gc_tuning import collect_when_quiet
from trimtab_operator.reconcile.gpu_claims import Stakes
from trimtab_operator.reconcile.health import Heartbeats, OperatorMetrics, measure_lag, serve_health, serve_metrics
from trimtab_operator.reconcile.kopf_handlers import ReconcileLoops, build_registry, build_settings
from trimtab_operator.reconcile.loop_thread import LoopThread
from trimtab_operator.reconcile.observer import Eyes
from trimtab_operator.reconcile.reconciler import Reconciler
from trimtab_operator.reconcile.wakeups import WakeUps
from trimtab_operator.resource.installation import Installation
from trimtab_operator.resource.spec import KIND

logger = logging.getLogger(__name__)

MAX_SILENCE_SECONDS = 300.0  # a loop that has not ticked for so long is stuck: two tick deadlines and a backoff
MAX_BLOCKED_SECONDS = 30.0  # a leader whose loops stand still for so long renews no more: ADR-0004


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of `trimtab-operator run`."""

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
    installation: Installation
    prometheus: Connection | None = None


async def run_operator(options: Options) -> int:
    """Serve until told to stop (0) or until the Lease is lost or a part ends (1). Raises MisconfiguredOperator."""
    stop = asyncio.Event()
    _hear_signals(stop)
    heartbeats = Heartbeats(max_age_seconds=max(MAX_SILENCE_SECONDS, 4 * options.tick_seconds))
    metrics = OperatorMetrics()
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster())
        prompt = await stack.enter_async_context(LoopThread("prompt"))
        door = await prompt.enter(Cluster())
        webhook = _webhook(door, options)
        health = await prompt.run(
            serve_health, options.liveness_port, heartbeats, is_ready=lambda: webhook is None or webhook.is_serving
        )
        stack.push_async_callback(prompt.run, health.cleanup)
        pages = await prompt.run(serve_metrics, options.metrics_port, metrics)
        stack.push_async_callback(prompt.run, pages.cleanup)
        await _check_installation(cluster)
        background = [measure_lag(heartbeats, metrics)]
        if webhook is not None:
            server = await prompt.run(webhook.start, options.webhook_port)
            stack.push_async_callback(prompt.run, server.cleanup)
            background.append(prompt.run(webhook.keep))
        async with _running(background):
            leadership = Leadership(prompt, _lease(door, options, heartbeats))
            code = await _lead(cluster, leadership, options, heartbeats, metrics, stop)
            if webhook is not None:
                await prompt.run(webhook.leave)
            return code


def _hear_signals(stop: asyncio.Event) -> None:
    """Let whoever wants the process to end be heard."""
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)


class Leadership:
    """The Lease, which is acquired, renewed and given back in a thread of its own."""

    def __init__(self, prompt: LoopThread, lease: LeaderLease) -> None:
        self.lease = lease
        self._prompt = prompt
        self._keeping: asyncio.Task[None] | None = None

    async def acquire(self, stop: asyncio.Event) -> bool:
        """Wait until the Lease is ours, unless told to stop first; whether it is. It is renewed from then on, whatever
        the caller does first."""
        if await _first(self._prompt.run(self._acquire), stop):
            return True
        await self.release()  # it may have become ours in the very moment
        return False

    async def lost(self) -> None:
        """Wait until the Lease is ours no more."""
        await self._prompt.run(self._lost)

    async def release(self) -> None:
        """Renew it no more, and give it back."""
        await self._prompt.run(self._release)

    async def _acquire(self) -> None:
        await self.lease.acquire()
        self._keeping = asyncio.create_task(self.lease.keep(), name="lease")

    async def _lost(self) -> None:
        assert self._keeping is not None
        await asyncio.wait({self._keeping})

    async def _release(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        await self.lease.release()


def _lease(door: Cluster, options: Options, heartbeats: Heartbeats) -> LeaderLease:
    return LeaderLease(
        door,
        namespace=options.operator_namespace,
        name=options.lease_name,
        identity=options.identity,
        may_renew=lambda: heartbeats.ran_within(MAX_BLOCKED_SECONDS),
    )


def _webhook(door: Cluster, options: Options) -> Webhook | None:
    if options.webhook_port == 0:
        return None
    return Webhook(
        door,
        Nodes(door),
        namespace=options.operator_namespace,
        service=options.service_name,
        secret=options.webhook_secret_name,
        configuration=options.webhook_config_name,
        default_image=options.default_image,
        allowed_privileges=options.installation.allowed_privileges,
    )


async def _check_installation(cluster: Cluster) -> None:
    """Without the CRD, Kopf would wait in silence: say it instead. The pod restarts until it is there."""
    try:
        await cluster.list(KIND, None)
    except CONNECTION_ERRORS as error:
        status = getattr(error, "status", None)
        if status == 404:
            raise MisconfiguredOperator(
                f"the cluster does not know {KIND}; install crds/trimtab.dev_inferencedeployments.yaml"
            ) from error
        if not isinstance(error, API_ERRORS):
            raise MisconfiguredOperator(f"the API server cannot be reached: {error}") from error


async def _lead(
    cluster: Cluster,
    leadership: Leadership,
    options: Options,
    heartbeats: Heartbeats,
    metrics: OperatorMetrics,
    stop: asyncio.Event,
) -> int:
    """Wait for the Lease, work while it is ours, give it back."""
    if not await leadership.acquire(stop):
        return 0
    logger.info("leading", extra={"identity": options.identity})
    metrics.leader.set(1)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(bounded_http.new_client())
        secret = await cluster.secret(options.operator_namespace, options.secret_name, {SECRET_KEY: new_secret()})
        is_leading = cluster.may_write = lambda: leadership.lease.is_held
        wake_ups = WakeUps()
        cache = cluster.cache = watches.new_cache(options.namespaces, wake_ups.ring)
        budget = options.installation.gpu_budget
        eyes = Eyes(
            cluster,
            Nodes(cluster),
            secret[SECRET_KEY],
            options.default_image,
            options.tick_seconds,
            former_secret=secret.get(FORMER_KEY) or None,
            installation=options.installation,
            prometheus=None
            if options.prometheus is None
            else await stack.enter_async_context(Prometheus(options.prometheus)),
            cache=cache,
            gpu_claims=None if budget is None else Stakes(budget, wake_ups.ring, cache),
        )
        hands = Hands(cluster, metrics, eyes.clock, is_leading)
        reconciler = Reconciler(eyes, hands, http, heartbeats, wake_ups)
        background = [watches.keep(cluster, cache), collect_when_quiet(lambda: reconciler.is_waited_for)]
        await stack.enter_async_context(_running(background))
        code = await _work(leadership, reconciler, cache, options, stop)
    metrics.leader.set(0)
    await leadership.release()
    return code


async def _work(
    leadership: Leadership, reconciler: Reconciler, cache: Cache, options: Options, stop: asyncio.Event
) -> int:
    """Run Kopf until told to stop (0), or until the Lease is lost or Kopf ends by itself (1)."""
    operator = asyncio.create_task(_run_loops(reconciler, cache, options, stop), name="kopf")
    keeper = asyncio.create_task(leadership.lost(), name="lease")
    stopper = asyncio.create_task(stop.wait(), name="stop")
    done, _ = await asyncio.wait({operator, keeper, stopper}, return_when=asyncio.FIRST_COMPLETED)
    if keeper in done:
        logger.error("leadership lost; ending, so that the pod starts clean")
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
    """Run Kopf and the reconcile loops it starts, once the children are listed: a loop would otherwise list its own."""
    if not await _first(watches.first_heard(cache), stop):
        return
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=build_registry(ReconcileLoops(reconciler), cache),
        settings=build_settings(),
        standalone=True,
        clusterwide=not options.namespaces,
        namespaces=options.namespaces,
        stop_flag=stop,
    )
    _hear_signals(stop)  # Kopf replaced them. Its stop flag ends it at once, since it has no task of its own to finish
    await kopf.run_tasks(tasks, ignored=others)


async def _first(awaited: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """Wait for a coroutine unless told to stop first; whether it finished."""
    work = asyncio.create_task(awaited)
    stopper = asyncio.create_task(stop.wait())
    await asyncio.wait({work, stopper}, return_when=asyncio.FIRST_COMPLETED)
    stopper.cancel()
    if work.done():
        await work
        return True
    work.cancel()
    return False


class _running:
    """Background coroutines that live as long as the block, and that nobody waits for."""

    def __init__(self, coroutines: list[Coroutine[None, None, None]]) -> None:
        self._tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
