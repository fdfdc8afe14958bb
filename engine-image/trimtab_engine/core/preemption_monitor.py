"""Measurement of preemption costs while serving, and the preemption warning."""

import logging

from trimtab_engine.core.execution import InFlightStep, StepResult
from trimtab_engine.scheduling.batch import Preempted
from trimtab_engine.scheduling.preemption import PreemptionCosts
from trimtab_engine.scheduling.scheduler import Scheduler

NEWEST_WEIGHT = 0.1  # weight of the newest step in the running mean costs per token and block
MIN_MEASURED_TOKENS = 32  # minimum of a prefill-only step for measuring the cost per token
WARNING_SECONDS = 10.0  # between two warnings

logger = logging.getLogger("trimtab_engine.core")


class PreemptionMonitor:
    """Gives the scheduler its costs. Times are the engine's clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_preempted = 0
        self._last_warning = float("-inf")

    def measure(self, in_flight: InFlightStep, result: StepResult, now: float) -> None:
        """Update the cost per token from prefill-only steps and the cost per block from completed copies."""
        costs, batch = self._scheduler.costs, in_flight.step.batch
        swapped = result.swapped
        is_undisturbed = in_flight.step.kind == "prefill" and not swapped.num_blocks
        if not (is_undisturbed or swapped.num_blocks):
            return  # nearly every step
        per_token, per_block = costs.recompute_seconds_per_token, costs.swap_seconds_per_block
        if is_undisturbed and batch.num_tokens >= MIN_MEASURED_TOKENS:
            seconds = (now - in_flight.started) / batch.num_tokens
            per_token += NEWEST_WEIGHT * (seconds - per_token)
        if swapped.num_blocks:
            per_block += NEWEST_WEIGHT * (swapped.seconds / swapped.num_blocks - per_block)
        self._scheduler.costs = PreemptionCosts(per_token, per_block)

    def warn(self, preempted: list[Preempted], now: float) -> None:
        """Log vLLM's preemption warning, which users and alerts search for."""
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
