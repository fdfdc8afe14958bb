"""Step statistics in the form that API servers receive."""

from trimtab_engine.core.execution import PreparedStep, StepResult
from trimtab_engine.device.kv_cache import KVCache
from trimtab_engine.messages.requests import StepStats
from trimtab_engine.runner.graphs.device_steps import GraphCounts
from trimtab_engine.scheduling.batch import Batch
from trimtab_engine.scheduling.scheduler import Scheduler

NO_BATCH = Batch(0, [], 0, [])


def step_stats(
    step: PreparedStep | None, result: StepResult, scheduler: Scheduler, kv_cache: KVCache, block_bytes: int
) -> StepStats:
    """Return the scheduler's counts since the last call and its state.

    Args:
        step: None if nothing was computed.
        block_bytes: Bytes of a block on all ranks together.

    The caller fills in times, grammar, configuration and rank values.
    """
    counts = scheduler.take_stats()
    batch = step.batch if step is not None else NO_BATCH
    return StepStats(
        step=batch.step,
        time=0.0,
        step_seconds=0.0,
        kind=step.kind if step is not None else "idle",
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        kv_blocks_used=scheduler.num_blocks_used,
        kv_blocks_total=kv_cache.num_blocks,
        kv_blocks_cap=kv_cache.cap_blocks,
        num_scheduled_tokens=batch.num_tokens,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_generation_tokens=counts.num_generation_tokens,
        num_batch_requests=step.num_requests if step is not None else 0,
        num_context_tokens=step.num_context_tokens if step is not None else 0,
        num_attended_tokens=step.num_attended_tokens if step is not None else 0,
        num_arrived=counts.num_arrived,
        num_arrived_prompt_tokens=counts.num_arrived_prompt_tokens,
        preempted=counts.preempted,
        recomputed_tokens=counts.recomputed_tokens,
        preempt_stall_seconds=counts.preempt_stall_seconds,
        blocked_seconds=counts.blocked_seconds,
        num_cached_prompt_tokens=counts.num_cached_prompt_tokens,
        prefix_cache_queries=counts.prefix_cache_queries,
        prefix_cache_hits=counts.prefix_cache_hits,
        num_host_cached_prompt_tokens=counts.num_host_cached_prompt_tokens,
        host_cache_queries=counts.host_cache_queries,
        host_cache_hits=counts.host_cache_hits,
        host_cache_blocks=scheduler.blocks.swap_space.num_kept,
        swapped_out_bytes=(len(batch.swap_out) - batch.num_offloaded) * block_bytes,
        swapped_in_bytes=(len(batch.swap_in) - batch.num_restored) * block_bytes,
        offloaded_bytes=batch.num_offloaded * block_bytes,
        restored_bytes=batch.num_restored * block_bytes,
        swap_seconds=result.swapped.seconds,
        num_waiting_tokens=scheduler.num_waiting_tokens,
        oldest_waiting_arrival=scheduler.oldest_arrival(),
        kv_blocks_cached=scheduler.blocks.num_cached,
        evicted_blocks=scheduler.blocks.take_evicted(),
        token_budget=scheduler.policy.max_num_batched_tokens,
        num_drafts=result.speculation.num_drafts,
        num_draft_tokens=result.speculation.num_draft_tokens,
        accepted_per_position=result.speculation.accepted_per_position,
        num_encoded_items=counts.num_encoded_items,
        num_encoded_tokens=counts.num_encoded_tokens,
        num_late=counts.num_late,
        num_waiting_late=scheduler.num_waiting_late,
    )


def note_graphs(stats: StepStats, counts: GraphCounts) -> None:
    """Add the graph counts of the step."""
    stats.graph_steps, stats.eager_steps = counts.steps, counts.eager
    stats.graph_padding_tokens, stats.graph_captures = counts.padding_tokens, counts.captures
    stats.kernel_compilations = counts.compilations
