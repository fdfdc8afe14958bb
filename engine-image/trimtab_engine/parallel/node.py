"""A node without the engine core: it starts its ranks' processes, and ends with them."""

import signal
import sys
import time

from trimtab_engine.config import EngineConfig
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.workers import STOP_SECONDS, rendezvous_of, start_processes

POLL_SECONDS = 0.2


def run_node(config: EngineConfig) -> int:
    """Run this node's workers until one ends or SIGTERM. Returns 0 when all ended as they were told, else 1."""
    layout = Layout.of(config, is_moe=False)  # data-parallel cores share one node
    count = layout.ranks_per_engine // config.nnodes
    numbers = range(config.node_rank * count, (config.node_rank + 1) * count)
    processes = start_processes(config, layout, numbers, rendezvous_of(config, None))
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while not stopped and all(process.poll() is None for process in processes.values()):
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + (0.0 if stopped else STOP_SECONDS)
    while time.monotonic() < deadline and any(process.poll() is None for process in processes.values()):
        time.sleep(POLL_SECONDS)
    for process in processes.values():
        if process.poll() is None:
            process.kill()
    codes = [process.wait() for process in processes.values()]
    if stopped or not any(codes):
        return 0
    print(f"trimtab-engine: node {config.node_rank} ends: a rank of the engine has ended", file=sys.stderr, flush=True)
    return max(code if code > 0 else 1 for code in codes if code)
