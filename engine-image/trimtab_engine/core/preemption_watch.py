"""What preemption is seen to cost while serving, and the warning that says that it happens."""

import logging

from trimtab_engine.core.execution import Flight, StepResult
from trimtab_engine.scheduling.batch import Preempted
from trimtab_engine.scheduling.preemption import PreemptionCosts
from trimtab_engine.scheduling.scheduler import Scheduler

NEWEST_WEIGHT = 0.1  # of the newest step in the running means of what a token and a block cost
MIN_MEASURED_TOKENS = 32  # of a step of prefill alone, to tell what computing a token costs
WARNING_SECONDS = 10.0  # between two warnings; each gives the number of preemptions so far

logger = logging.getLogger("trimtab_engine.core")


class PreemptionWatch:
    """Gives the scheduler its costs. Times are the engine's clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_preempted = 0
        self._last_warning = float("-inf")

    def measure(self, flight: Flight, result: StepResult, now: float) -> None:
        """A token's cost from steps of prefill alone, a block's from copies that have ended."""
        costs, batch = self._scheduler.costs, flight.step.batch
        swapped = result.swapped
        is_undisturbed = flight.step.kind == "prefill" and not swapped.num_blocks
        if not (is_undisturbed or swapped.num_blocks):
            return  # nearly every step
        per_token, per_block = costs.recompute_seconds_per_token, costs.swap_seconds_per_block
        if is_undisturbed and batch.num_tokens >= MIN_MEASURED_TOKENS:
            seconds = (now - flight.started) / batch.num_tokens
            per_token += NEWEST_WEIGHT * (seconds - per_token)
        if swapped.num_blocks:
            per_block += NEWEST_WEIGHT * (swapped.seconds / swapped.num_blocks - per_block)
        self._scheduler.costs = PreemptionCosts(per_token, per_block)

    def warn(self, preempted: list[Preempted], now: float) -> None:
        """vLLM's line, which people and alerts look for."""
        self._num_preempted += len(preempted)
        if now - self._last_warning < WARNING_SECONDS:
            return
        self._last_warning = now
        first = preempted[0]
        logger.warning(
            "Sequence group %s is preempted by PreemptionMode.%s mode because there is not enough KV cache space. This "
            "can affect the end-to-end performance. Increase gpu_memory_utilization or tensor_parallel_size to provide "
            "more KV cache memory. total_cumulative_preemption_cnt=%d (tokens %s: %d; KV blocks in use: %d of %d)",
            first.request.request_id,
            first.mode.upper(),
            self._num_preempted,
            "to compute again" if first.mode == "recompute" else "moved to the swap space",
            first.num_tokens,
            self._scheduler.num_blocks_used,
            self._scheduler.num_blocks_total,
        )
