"""How the ranks of an engine find each other, and the process groups that they make of it.

One node: a file in a private folder, and gloo on the loopback interface, so that nothing listens on the network.
Several: torch's TCP store on --master-addr and --master-port, which the node of the engine core serves; ranks and
messages then use the nodes' own addresses towards it. With a secret of the nodes the store is behind relays that ask
for it (guarded_store.py); without one, and for what gloo and NCCL send, the network between the nodes is trusted
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
from trimtab_engine.ipc.shared_secret import NotProven, SharedSecret
from trimtab_engine.parallel.groups import RankGroup, RankGroups, WireMeter
from trimtab_engine.parallel.ranks import Layout

STORE_TIMEOUT = timedelta(minutes=10)  # for what every rank writes once all are there
ASK_SECONDS = 15.0  # for the core to answer, which takes milliseconds
KEY_TIMEOUT = timedelta(seconds=10)  # for what the core writes as soon as it serves the store
STEP_TIMEOUT = timedelta(minutes=10)  # a stage waits for the one before it: as long as its longest step
CONNECT_SECONDS = 3.0  # an address whose node is gone swallows packets: try again, it may lead elsewhere by then
RETRY_SECONDS = 1.0
ID_KEY = "rendezvous-id"

logger = logging.getLogger("trimtab_engine.rendezvous")


def open_store(rendezvous: str, *, serves: bool, secret: SharedSecret | None = None) -> Store:
    """The store of the world's ranks. `serves`: this process holds it (the first engine core), on this node's own
    address. `secret`: the nodes', without which nobody reaches it."""
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
    """End the relay when nobody holds the store any more; at the process's end nothing needs to be ended."""
    weakref.finalize(store, relay.close).atexit = False


def announce_core(store: Store, config: EngineConfig, control: str) -> None:
    """Say where the core's control socket is, and whose core it is."""
    store.set(_control_key(config), control)
    store.set(ID_KEY, config.rendezvous_id)


def find_core(rendezvous: str, config: EngineConfig) -> tuple[Store, str]:
    """The store of this rank's core, and its control address. Waits as long as it takes for one with the same id."""
    told = False
    while True:
        secret = SharedSecret.read(config.rendezvous_secret_file)  # anew: nodes may be given theirs at different times
        if not rendezvous.startswith("file:"):
            _await_listener(*_host_and_port(rendezvous))
        answer = _ask(rendezvous, config, secret)
        if isinstance(answer, NotProven):
            if not told:
                logger.warning("%s is not this node's replica: %s; waiting for one with the same", rendezvous, answer)
                told = True
        elif isinstance(answer, Exception):
            logger.info("the engine core could not be asked (%s); asking again", str(answer).partition("\n")[0])
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
    """The store, the core's id and its control address; or why there is no answer.

    In a thread of its own: on a node that stands still the kernel accepts connections for a core that answers none, and
    torch's client then waits whatever its timeout is.
    """
    answers: queue.SimpleQueue[tuple[Store, str, str] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            store = open_store(rendezvous, serves=False, secret=secret)
            store.wait([ID_KEY, _control_key(config)], KEY_TIMEOUT)
            answers.put((store, store.get(ID_KEY).decode(), store.get(_control_key(config)).decode()))
        except (RuntimeError, OSError, NotProven) as error:  # torch's: the core went while it was asked
            answers.put(error)

    threading.Thread(target=ask, name="ask-core", daemon=True).start()
    try:
        return answers.get(timeout=ASK_SECONDS)
    except queue.Empty:
        return TimeoutError(f"it accepts connections and has not answered for {ASK_SECONDS:g} s")


def _await_listener(host: str, port: int) -> None:
    """Return when somebody listens there. Resolves and connects anew each time: the address may change its owner."""
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
    """The address under which the other nodes of this rendezvous reach this one."""
    return own_address(*_host_and_port(rendezvous))


def _host_and_port(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.removeprefix("tcp:").rpartition(":")
    return host, int(port)


def _interface(rendezvous: str) -> str | None:
    """Over which the ranks talk; None: the one that the host name leads to."""
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
    """The end of this process's part."""
    if dist.is_initialized():
        dist.destroy_process_group()
