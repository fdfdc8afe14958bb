"""Rendezvous of an engine's ranks and the creation of their process groups.

On one node: a file in a private folder, and gloo on the loopback interface, so that no port is open on the network. On
several nodes: torch's TCP store on --master-addr and --master-port, served by the engine core's node; ranks and
messages use the nodes' addresses towards it. With a secret the store is behind authenticating relays
(guarded_store.py); without one, and for gloo and NCCL traffic, the network between the nodes is trusted
(docs/concepts/parallelism.md).
"""

import logging
import queue
import socket
import threading
import time
import weakref
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from trimtab_engine.config.engine import LOOPBACK_INTERFACE, EngineConfig, use_interface_between_ranks
from trimtab_engine.errors import ConfigError
from trimtab_engine.executor.guarded_store import LOOPBACK, Relay, guard_store, reach_store
from trimtab_engine.ipc.network import family_of, interface_of, own_address
from trimtab_engine.ipc.shared_secret import AuthenticationFailed, SharedSecret
from trimtab_engine.parallel.groups import RankGroup, RankGroups, WireMeter
from trimtab_engine.parallel.ranks import Layout

STORE_TIMEOUT = timedelta(minutes=10)  # for keys that every rank writes after all have joined
CORE_REPLY_SECONDS = 15.0  # for the core to answer, which takes milliseconds
KEY_TIMEOUT = timedelta(seconds=10)  # for keys that the core writes when it serves the store
STEP_TIMEOUT = timedelta(minutes=10)  # a stage waits for the one before it: as long as its longest step
CONNECT_SECONDS = 3.0  # packets to a lost node are dropped: retry, the address may have moved
RETRY_SECONDS = 1.0
ID_KEY = "rendezvous-id"

logger = logging.getLogger("trimtab_engine.rendezvous")


def open_store(rendezvous: str, *, serves: bool, secret: SharedSecret | None = None) -> Store:
    """Open the store of the world's ranks. `serves`: this process (the first engine core) serves it on this node's
    address. `secret`: the nodes' secret; with it, unauthenticated access is rejected.
    """
    kind, _, address = rendezvous.partition(":")
    if kind == "file":
        return FileStore(address)
    host, port = _host_and_port(rendezvous)
    if not serves:
        return _store_client(host, port) if secret is None else _relayed_client(host, port, secret)
    own = own_address_at(rendezvous)
    try:
        listener = socket.create_server((own, port), family=family_of(own))
    except OSError as error:
        raise ConfigError(f"port {port} on {own}, where the nodes meet, cannot be bound: {error.strerror}") from error
    if secret is None:
        return _served_store(listener)
    hidden = socket.create_server((LOOPBACK, 0))
    store_port = hidden.getsockname()[1]
    store = _served_store(hidden)
    _close_with(store, guard_store(listener, store_port, secret))
    return store


def _served_store(listener: socket.socket) -> Store:
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address, port, None, True, timeout=STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _store_client(host: str, port: int) -> Store:
    return TCPStore(host, port, None, False, timeout=STORE_TIMEOUT, wait_for_workers=False)


def _relayed_client(host: str, port: int, secret: SharedSecret) -> Store:
    relay = reach_store(host, port, secret)
    try:
        store = _store_client(LOOPBACK, relay.port)
    except BaseException:
        relay.close()
        raise
    _close_with(store, relay)
    return store


def _close_with(store: Store, relay: Relay) -> None:
    """Close the relay when the store is garbage collected; at process exit nothing needs to be closed."""
    weakref.finalize(store, relay.close).atexit = False


def announce_core(store: Store, config: EngineConfig, control: str) -> None:
    """Publish the address and identity of the core's control socket."""
    store.set(_control_key(config), control)
    store.set(ID_KEY, config.rendezvous_id)


def find_core(rendezvous: str, config: EngineConfig) -> tuple[Store, str]:
    """Return the store of this rank's core, and its control address. Waits as long as it takes for one with the same
    id.
    """
    told = False
    while True:
        # resolve again: nodes may get their addresses at different times
        secret = SharedSecret.read(config.rendezvous_secret_file)
        if not rendezvous.startswith("file:"):
            _await_listener(*_host_and_port(rendezvous))
        answer = _ask(rendezvous, config, secret)
        if isinstance(answer, AuthenticationFailed):
            if not told:
                logger.warning("%s is not this node's replica: %s; waiting for one with the same", rendezvous, answer)
                told = True
        elif isinstance(answer, Exception):
            logger.info("the engine core did not answer (%s); retrying", str(answer).partition("\n")[0])
        else:
            store, found, control = answer
            if found == config.rendezvous_id:
                return store, control
            if not told:
                logger.warning(
                    "the engine core at %s has --rendezvous-id %r, this node %r: waiting for one with the same",
                    rendezvous,
                    found,
                    config.rendezvous_id,
                )
                told = True
        time.sleep(RETRY_SECONDS)


def _ask(rendezvous: str, config: EngineConfig, secret: SharedSecret | None) -> tuple[Store, str, str] | Exception:
    """Return the store, the core's id and its control address, or the reason for no answer. Run in a separate thread:
    on a frozen node the kernel accepts connections that no core answers, and torch's client then ignores its timeout.
    """
    answers: queue.SimpleQueue[tuple[Store, str, str] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            store = open_store(rendezvous, serves=False, secret=secret)
            store.wait([ID_KEY, _control_key(config)], KEY_TIMEOUT)
            answers.put((store, store.get(ID_KEY).decode(), store.get(_control_key(config)).decode()))
        # torch's error: the core ended during the request
        except (RuntimeError, OSError, AuthenticationFailed) as error:
            answers.put(error)

    threading.Thread(target=ask, name="ask-core", daemon=True).start()
    try:
        return answers.get(timeout=CORE_REPLY_SECONDS)
    except queue.Empty:
        return TimeoutError(f"it accepts connections and has not answered for {CORE_REPLY_SECONDS:g} s")


def _await_listener(host: str, port: int) -> None:
    """Return when a listener accepts connections. Resolves and connects again each time: the address may move to
    another node.
    """
    told = False
    while True:
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            if not told:
                logger.info("waiting for the engine core at %s:%d (%s)", host, port, error)
                told = True
            time.sleep(RETRY_SECONDS)
        else:
            return


def _control_key(config: EngineConfig) -> str:
    return f"control-{config.data_parallel_rank}"


def own_address_at(rendezvous: str) -> str:
    """Return the address under which the other nodes of this rendezvous reach this one."""
    return own_address(*_host_and_port(rendezvous))


def _host_and_port(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.removeprefix("tcp:").rpartition(":")
    return host, int(port)


def _interface(rendezvous: str) -> str | None:
    """Return the interface for traffic between ranks. None means the one that the host name resolves to."""
    return LOOPBACK_INTERFACE if rendezvous.startswith("file:") else interface_of(own_address_at(rendezvous))


def join_groups(store: Store, layout: Layout, rank: int, *, uses_nccl: bool, rendezvous: str) -> RankGroups:
    """Join the world and this rank's groups; returns when every rank has. All ranks make all groups in one order."""
    use_interface_between_ranks(_interface(rendezvous))
    dist.init_process_group(
        "nccl" if uses_nccl else "gloo",
        store=PrefixStore("torch", store),
        rank=rank,
        world_size=layout.world_size,
        timeout=STEP_TIMEOUT,
    )
    meter = WireMeter()

    def own_group(groups: tuple[tuple[int, ...], ...], backend: str | None = None) -> RankGroup | None:
        own = None
        for ranks in groups:
            if len(ranks) > 1:
                made = dist.new_group(list(ranks), timeout=STEP_TIMEOUT, backend=backend)
                if rank in ranks:
                    own = RankGroup(made, ranks, rank, meter)
        return own

    tensor = own_group(layout.tensor_groups())
    data = own_group(layout.data_groups())
    return RankGroups(
        tensor=tensor,
        pipeline=own_group(layout.pipeline_groups()),
        data=data,
        expert=(own_group(layout.expert_groups()) if tensor and data else tensor or data) if layout.expert else None,
        lockstep=own_group(layout.data_groups(), "gloo") if uses_nccl else data,
        meter=meter,
    )


def leave_groups() -> None:
    """Leave the process groups at the end of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
