"""Load balance of data-parallel cores on a recorded trace: the API servers' balancer compared with round robin.

Simulated, so that results do not depend on the machine: the real scheduler of each core, the real balancer, and a
computed step time. A core admits a request on arrival; in the engine it does so at the end of the running step.

    python -m engine_benchmarks.balance_bench TRACE... [--cores 4] [--speedup 8] [--duration 600]
"""

import argparse
import heapq
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimtab_engine.bench.serving.traces import Cut, TraceRequest, read_trace, scale_to_fit
from trimtab_engine.engine_client.balancer import CoreBalancer
from trimtab_engine.scheduling.batch import Batch
from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.policy import SchedulingPolicy
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.scheduler import Scheduler

NUM_CORES = 4
SPEEDUP = 8.0
DURATION_SECONDS = 600.0  # of the trace's own time
NUM_BLOCKS = 6000
BLOCK_SIZE = 16
MAX_MODEL_LEN = 16_384
MAX_NUM_SEQS = 128
MAX_NUM_BATCHED_TOKENS = 2048
# A step of an 8-billion-parameter model in bfloat16 on a large GPU, computed from its memory and arithmetic; not
# measured. Weights are read once, every new token takes 16 GFLOP, every token of context 128 KiB of KV cache.
STEP_SECONDS = 0.008
NEW_TOKEN_SECONDS = 32e-6
CONTEXT_TOKEN_SECONDS = 33e-9
WORD, END = 5, 2

Choose = Callable[["Cluster", Request], int]


@dataclass(slots=True)
class Core:
    """One engine core: its scheduler, and the step that runs until `busy_until`."""

    scheduler: Scheduler
    batch: Batch | None = None
    busy_seconds: float = 0.0
    num_preemptions: int = 0

    @property
    def num_requests(self) -> int:
        return self.scheduler.num_unfinished


@dataclass(slots=True)
class Cluster:
    """The cores, and the API server's view of them."""

    cores: list[Core]
    balancer: CoreBalancer
    core_of: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy on one trace. Ratios are of the fullest core to the mean of all; 1 is perfect."""

    policy: str
    requests_max_over_mean: float
    """Requests in the cores, averaged over time."""
    kv_max_over_mean: float
    """KV blocks in use, averaged over time."""
    busy_max_over_mean: float
    ttft_p50_seconds: float
    ttft_p95_seconds: float
    preemptions: int


def round_robin(cluster: Cluster, request: Request) -> int:
    return len(cluster.core_of) % len(cluster.cores)


def exact_admission(cluster: Cluster, request: Request) -> int:
    """Admit as engine_client/client.py does: try the least loaded core first; a core that cannot run the request at
    once rejects it; if all do, the least loaded one queues it.
    """
    refused: frozenset[int] = frozenset()
    while True:
        core = cluster.balancer.choose(refused)
        has_room = cluster.cores[core].scheduler.has_room_for(request.num_tokens)
        if has_room or len(refused) == len(cluster.cores):
            return core
        refused |= {core}


POLICIES: dict[str, Choose] = {"round robin": round_robin, "least loaded, exact admission": exact_admission}


def simulate(trace: Sequence[TraceRequest], policy: str, num_cores: int = NUM_CORES) -> Figures:
    """Simulate the whole trace."""
    cluster = Cluster([Core(_scheduler()) for _ in range(num_cores)], CoreBalancer(num_cores))
    # Events: (time, 0 for an arrival or 1 for the end of a step, request or core).
    events = [(one.timestamp, 0, number) for number, one in enumerate(trace)]
    heapq.heapify(events)
    watch = _Watch()
    first_tokens: dict[str, float] = {}
    while events:
        now, kind, who = heapq.heappop(events)
        watch.until(now, cluster)
        if kind == 0:
            who = _arrive(cluster, trace[who], who, POLICIES[policy])
        else:
            _end_step(cluster, who, now, first_tokens)
        core = cluster.cores[who]
        if core.batch is None and (seconds := _begin_step(core, now)) is not None:
            heapq.heappush(events, (now + seconds, 1, who))
    waits = [first_tokens[f"r{number}"] - one.timestamp for number, one in enumerate(trace)]
    cuts = statistics.quantiles(waits, n=20)
    busy = [core.busy_seconds for core in cluster.cores]
    return Figures(
        policy,
        *watch.ratios(),
        max(busy) / statistics.mean(busy),
        statistics.median(waits),
        cuts[-1],
        sum(core.num_preemptions for core in cluster.cores),
    )


def _scheduler() -> Scheduler:
    return Scheduler(
        BlockManager(NUM_BLOCKS, NUM_BLOCKS, BLOCK_SIZE),
        SchedulingPolicy(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[END],
    )


def _arrive(cluster: Cluster, one: TraceRequest, number: int, choose: Choose) -> int:
    sampling = Sampling(max_tokens=one.output_len, temperature=0.0, ignore_eos=True)
    prompt = [number + 10, *[WORD] * (one.input_len - 1)]  # no two requests share a prefix
    request = Request.of(f"r{number}", prompt, sampling, arrival_time=one.timestamp)
    core = choose(cluster, request)
    cluster.cores[core].scheduler.add(request)
    cluster.balancer.sent(core)
    cluster.core_of[request.request_id] = core
    return core


def _begin_step(core: Core, now: float) -> float | None:
    """Start a step and return its duration; None if there is nothing to run."""
    batch = core.scheduler.schedule(now)
    core.num_preemptions += len(batch.preempted)
    if not batch.sequences:
        return None
    core.batch = batch
    context = sum(sequence.start + sequence.num_tokens for sequence in batch.sequences)
    seconds = STEP_SECONDS + NEW_TOKEN_SECONDS * batch.num_tokens + CONTEXT_TOKEN_SECONDS * context
    core.busy_seconds += seconds
    return seconds


def _end_step(cluster: Cluster, index: int, now: float, first_tokens: dict[str, float]) -> None:
    core = cluster.cores[index]
    batch, core.batch = core.batch, None
    assert batch is not None
    for request, _, finished in core.scheduler.update(batch, [WORD] * len(batch.sampling), now):
        first_tokens.setdefault(request.request_id, now)
        if finished is not None:
            cluster.balancer.ended(index)
    scheduler = core.scheduler
    usage = scheduler.num_blocks_used / scheduler.num_blocks_total
    cluster.balancer.report(index, num_running=scheduler.num_running, num_waiting=scheduler.num_waiting, kv_usage=usage)


class _Watch:
    """Time-weighted means of the fullest core and of all cores, while they have requests."""

    def __init__(self) -> None:
        self._now = 0.0
        self._fullest = [0.0, 0.0]
        self._mean = [0.0, 0.0]

    def until(self, now: float, cluster: Cluster) -> None:
        """Add the time since the last call with the cores' current contents."""
        seconds, self._now = now - self._now, now
        requests = [core.num_requests for core in cluster.cores]
        blocks = [core.scheduler.num_blocks_used for core in cluster.cores]
        for kind, loads in enumerate((requests, blocks)):
            self._fullest[kind] += seconds * max(loads)
            self._mean[kind] += seconds * sum(loads) / len(loads)

    def ratios(self) -> tuple[float, float]:
        requests, blocks = (full / mean for full, mean in zip(self._fullest, self._mean, strict=True))
        return requests, blocks


def report(trace: str, num_requests: int, figures: Sequence[Figures]) -> str:
    """Return the rows of a table."""
    rows = [
        f"| {trace}, {num_requests} requests | {one.policy} | {one.requests_max_over_mean:.2f} | "
        f"{one.kv_max_over_mean:.2f} | {one.busy_max_over_mean:.2f} | {one.ttft_p50_seconds * 1000:.0f} | "
        f"{one.ttft_p95_seconds * 1000:.0f} | {one.preemptions} |"
        for one in figures
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--cores", type=int, default=NUM_CORES)
    parser.add_argument("--speedup", type=float, default=SPEEDUP, help="how much faster than recorded")
    parser.add_argument("--duration", type=float, default=DURATION_SECONDS, help="seconds of the trace's own time")
    arguments = parser.parse_args()
    print("| trace | policy | requests | KV blocks | busy time | TTFT p50, ms | TTFT p95, ms | preemptions |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for path in arguments.traces:
        recorded = read_trace(path, cut=Cut(duration=arguments.duration), seed=0)
        _, fitted = scale_to_fit(recorded, max_model_len=MAX_MODEL_LEN, scale=1.0)
        trace = [TraceRequest(one.timestamp / arguments.speedup, one.input_len, one.output_len) for one in fitted]
        figures = [simulate(trace, policy, arguments.cores) for policy in POLICIES]
        print(report(path.name.partition(".")[0], len(trace), figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
