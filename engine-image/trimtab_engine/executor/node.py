"""Entry point of a node that only runs workers of the single engine core. It ends with them."""

import signal
import sys
import time

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.executor.workers import STOP_SECONDS, rendezvous_of, start_processes
from trimtab_engine.parallel.ranks import Layout

POLL_SECONDS = 0.2
OWN_SIGTERM_SECONDS = 5.0  # for SIGTERM to reach this node, too, when the engine ends in order


def run_node(config: EngineConfig) -> int:
    """Run this node's workers until one ends. Return 0 if all ended on request, else 1."""
    layout = Layout.of(config, is_moe=False)  # one engine core: there are no others to share experts with
    count = config.ranks_per_node
    numbers = range(config.node_rank * count, (config.node_rank + 1) * count)
    processes = start_processes(config, layout, numbers, rendezvous_of(config, layout, None))
    signals = 0

    def stop(number: int, _: object) -> None:
        """The ranks stay as long as the engine core, which may be draining, needs them; a second word ends them."""
        nonlocal signals
        signals += 1 if number == signal.SIGTERM else 2
        for process in processes.values():
            process.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while signals < 2 and all(process.poll() is None for process in processes.values()):
        time.sleep(POLL_SECONDS)
    stopped = signals > 0
    deadline = time.monotonic() + (0.0 if signals > 1 else STOP_SECONDS)
    while time.monotonic() < deadline and any(process.poll() is None for process in processes.values()):
        time.sleep(POLL_SECONDS)
    for process in processes.values():
        if process.poll() is None:
            process.kill()
    codes = [process.wait() for process in processes.values()]
    if stopped:
        return 0
    if not any(codes):
        deadline = time.monotonic() + OWN_SIGTERM_SECONDS
        # otherwise its container would restart and have to end again
        while not signals and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return 0
    print(f"trimtab-engine: node {config.node_rank} ends: a rank of the engine has ended", file=sys.stderr, flush=True)
    return max(code if code > 0 else 1 for code in codes if code)
