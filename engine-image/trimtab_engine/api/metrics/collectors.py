"""Collectors of metric families by topic, each updated from batches of StepStats: work, saturation, CUDA graphs,
speculation, adapters, experts.
"""

import time
from collections.abc import Sequence

from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages.requests import ExpertBalance, StepStats

STEP_KINDS = ("prefill", "decode", "mixed")
STEP_SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
RATIO_BUCKETS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
MAX_NUM_SEQS_FIELD = "max_num_seqs"  # name of the live field
GRAPH_KINDS = ("full", "piecewise")
EAGER_REASONS = ("off", "too_large", "mixed", "images")


class WorkMetrics:
    """Work of steps, summed by kind of step, from which a model of the engine's step time is fitted.

    A step's time is nearly linear in its computed tokens, its sequences, the tokens whose keys and values it reads, and
    the attention pairs. Sums keep this exact over any interval, independent of the scrape period.
    """

    def __init__(self, families: FamilyFactory) -> None:
        self._seconds = families.labelled_histogram(
            "trimtab_step_seconds", "Duration of a step", STEP_SECONDS_BUCKETS, "kind"
        )
        self._tokens = families.labelled_counter("trimtab_step_tokens", "Tokens computed by steps", "kind")
        self._sequences = families.labelled_counter("trimtab_step_sequences", "Sequences in steps", "kind")
        self._context = families.labelled_counter(
            "trimtab_step_context_tokens", "Tokens whose keys and values steps read (sum of sequence lengths)", "kind"
        )
        self._attended = families.labelled_counter(
            "trimtab_step_attended_tokens", "Pairs of a computed token and an attended token", "kind"
        )
        self._arrived = families.counter("trimtab_arrived_requests", "Sequences queued for the first time")
        self._arrived_tokens = families.counter(
            "trimtab_arrived_prompt_tokens", "Prompt tokens of sequences queued for the first time"
        )
        for kind in STEP_KINDS:
            for family in (self._seconds, self._tokens, self._sequences, self._context, self._attended):
                family.of(kind)

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        self._arrived.inc(sum(stats.num_arrived for stats in steps))
        self._arrived_tokens.inc(sum(stats.num_arrived_prompt_tokens for stats in steps))
        by_kind: dict[str, list[StepStats]] = {}
        for stats in steps:
            if stats.num_scheduled_tokens:
                by_kind.setdefault(stats.kind, []).append(stats)
        for kind, alike in by_kind.items():
            self._seconds.of(kind).observe_all([stats.step_seconds for stats in alike])
            self._tokens.of(kind).inc(sum(stats.num_scheduled_tokens for stats in alike))
            self._sequences.of(kind).inc(sum(stats.num_batch_requests for stats in alike))
            self._context.of(kind).inc(sum(stats.num_context_tokens for stats in alike))
            self._attended.of(kind).inc(sum(stats.num_attended_tokens for stats in alike))


class SaturationMetrics:
    """Fill ratio of steps and length of the queue, the gradient that tuning follows."""

    def __init__(self, families: FamilyFactory) -> None:
        self._max_num_seqs = 0.0
        self._waiting_by_reason = families.labelled_gauge(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by reason", "reason"
        )
        self._waiting_tokens = families.gauge(
            "trimtab_waiting_tokens", "Tokens that waiting requests must compute before their first output"
        )
        self._oldest = families.gauge("trimtab_oldest_waiting_seconds", "Waiting time of the oldest waiting request")
        self._late = families.counter(
            "trimtab_requests_late", "Requests that could no longer meet the TTFT target when scheduled"
        )
        self._waiting_late = families.gauge(
            "trimtab_num_requests_waiting_late", "Waiting requests that can no longer meet the TTFT target"
        )
        self._budget = families.histogram(
            "trimtab_budget_used_ratio", "Scheduled tokens of a step divided by max_num_batched_tokens", RATIO_BUCKETS
        )
        self._fill = families.histogram(
            "trimtab_batch_fill_ratio", "Requests of a step divided by max_num_seqs", RATIO_BUCKETS
        )

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        budgets: list[float] = []
        fills: list[float] = []
        for stats in steps:
            if stats.config_values is not None:
                self._max_num_seqs = stats.config_values.get(MAX_NUM_SEQS_FIELD, self._max_num_seqs)
            if stats.num_scheduled_tokens and stats.token_budget:
                budgets.append(stats.num_scheduled_tokens / stats.token_budget)
            if stats.num_scheduled_tokens and self._max_num_seqs:
                fills.append(stats.num_batch_requests / self._max_num_seqs)
        self._late.inc(sum(stats.num_late for stats in steps))
        self._budget.observe_all(budgets)
        self._fill.observe_all(fills)
        self._show_queue(steps[-1])

    def _show_queue(self, stats: StepStats) -> None:
        self._waiting_by_reason.of("capacity").set(stats.num_waiting)
        self._waiting_by_reason.of("deferred").set(stats.num_deferred)
        self._waiting_tokens.set(stats.num_waiting_tokens)
        self._waiting_late.set(stats.num_waiting_late)
        oldest = stats.oldest_waiting_arrival
        self._oldest.set(0.0 if oldest is None else max(0.0, stats.time - oldest))


class GraphMetrics:
    """Steps that replay a CUDA graph, reasons of those that do not, and padding. On the CPU, which has no graphs, all
    counters stay 0.
    """

    def __init__(self, families: FamilyFactory) -> None:
        self._steps = families.labelled_counter(
            "trimtab_graph_steps", "Steps that replayed CUDA graphs: one full graph, or piecewise graphs", "kind"
        )
        self._eager = families.labelled_counter(
            "trimtab_eager_steps", "Steps on CUDA without a graph, by reason", "reason"
        )
        self._padding = families.counter("trimtab_graph_padding_tokens", "Padding rows computed by graphs")
        self._captures = families.counter("trimtab_graph_captures", "CUDA graphs captured while serving")
        self._compilations = families.counter(
            "trimtab_kernel_compilations", "Kernels compiled while serving; expected to stay 0 after startup"
        )
        for kind in GRAPH_KINDS:
            self._steps.of(kind)
        for reason in EAGER_REASONS:
            self._eager.of(reason)

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        for stats in steps:
            for kind, count in stats.graph_steps.items():
                self._steps.of(kind).inc(count)
            for reason, count in stats.eager_steps.items():
                self._eager.of(reason).inc(count)
        self._padding.inc(sum(stats.graph_padding_tokens for stats in steps))
        self._captures.inc(sum(stats.graph_captures for stats in steps))
        self._compilations.inc(sum(stats.kernel_compilations for stats in steps))


class SpeculationMetrics:
    """vLLM's families of speculative decoding: verified drafts, accepted tokens, and acceptance by position.

    Without speculation the counters stay 0. A "draft" is one request's draft tokens in one step.
    """

    def __init__(self, families: FamilyFactory) -> None:
        self._drafts = families.counter("vllm:spec_decode_num_drafts", "Drafts verified, one per request and step")
        self._draft_tokens = families.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified")
        self._accepted = families.counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self._per_position = families.labelled_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft",
            "position",
        )

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        for stats in steps:
            if stats.num_drafts:
                self._count(stats)

    def _count(self, stats: StepStats) -> None:
        self._drafts.inc(stats.num_drafts)
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted.inc(sum(stats.accepted_per_position))
        for position, count in enumerate(stats.accepted_per_position):
            self._per_position.of(str(position)).inc(count)


class AdapterMetrics:
    """vLLM's family of running and waiting adapters: labels hold the names, the value is the time. Without adapters it
    has no samples.
    """

    def __init__(self, families: FamilyFactory) -> None:
        self._info = families.labelled_gauge(
            "vllm:lora_requests_info",
            "Adapters with running and with waiting requests; the value is the Unix time of the sample",
            "max_lora",
            "waiting_lora_adapters",
            "running_lora_adapters",
        )

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        adapters = next((stats.adapters for stats in reversed(steps) if stats.adapters is not None), None)
        if adapters is not None:
            self._info.clear()
            labels = str(adapters.max_loras), ",".join(adapters.waiting), ",".join(adapters.running)
            self._info.of(*labels).set(time.time())


class ExpertMetrics:
    """Evenness of expert loads over ranks, and cost of rearrangements. Without expert load balancing the gauge has no
    sample and the counters stay 0.
    """

    def __init__(self, families: FamilyFactory) -> None:
        self._balancedness = families.labelled_gauge(
            "trimtab_expert_balancedness",
            "Mean divided by maximum token load of the ranks, over the layers of the core's pipeline stage",
        )
        self._rearrangements = families.counter(
            "trimtab_expert_rearrangements", "Evaluations of the expert placement, with or without changes"
        )
        self._moved = families.counter(
            "trimtab_expert_moved_bytes", "Bytes of expert weights received by the core's own rank"
        )
        self._seconds = families.counter("trimtab_expert_rearrange_seconds", "Seconds spent rearranging experts")

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        for stats in steps:
            if stats.expert_balance is not None:
                self._count(stats.expert_balance)

    def _count(self, news: ExpertBalance) -> None:
        if news.balancedness is not None:
            self._balancedness.of().set(news.balancedness)
        self._rearrangements.inc(news.num_rearrangements)
        self._moved.inc(news.moved_bytes)
        self._seconds.inc(news.seconds)
