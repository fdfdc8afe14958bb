"""vLLM's periodic statistics line: what the engine did since the last one, and how it stands."""

from collections import deque

from trimtab_engine.messages import SpeculationCounts, StepStats

RECENT_LOOKUPS = 1000  # steps with look-ups that the hit rate is taken over; vLLM takes as many requests


class Interval:
    """Sums since the last line. Prompt tokens are those that were computed, not those found in the prefix cache."""

    def __init__(self, prompt_tokens: int = 0, generation_tokens: int = 0, preemptions: int = 0) -> None:
        self.prompt_tokens, self.generation_tokens, self.preemptions = prompt_tokens, generation_tokens, preemptions
        self.speculation = SpeculationCounts()

    def add(self, stats: StepStats) -> None:
        self.prompt_tokens += stats.num_prompt_tokens - stats.num_cached_prompt_tokens
        self.generation_tokens += stats.num_generation_tokens
        if stats.preempted:
            self.preemptions += sum(sum(reasons.values()) for reasons in stats.preempted.values())
        if stats.num_drafts:
            self.speculation.add(stats.num_drafts, stats.num_draft_tokens, stats.accepted_per_position)


class StatisticsLine:
    """Collects what one core's steps report and makes lines of it. Take one only after the first step."""

    def __init__(self, engine: int = 0, device: str = "cuda") -> None:
        self._engine, self._device = engine, device
        self._interval, self._hit_rate = Interval(), HitRate()
        self._latest: StepStats | None = None
        self._was_idle = True

    def add(self, stats: StepStats) -> None:
        self._latest = stats
        self._interval.add(stats)
        self._hit_rate.add(stats)

    def take(self, seconds: float) -> tuple[list[str], bool]:
        """The line of the `seconds` since the last one, with one on drafts when there were any, and whether it can go
        unread: nothing happened in them or in those before, and nothing waits."""
        latest = self._latest
        assert latest is not None
        interval, self._interval = self._interval, Interval()
        is_idle = not (interval.prompt_tokens or interval.generation_tokens or latest.num_running or latest.num_waiting)
        was_idle, self._was_idle = self._was_idle, is_idle
        lines = [statistics_line(self._engine, interval, latest, self._hit_rate, seconds, self._device)]
        if interval.speculation.num_drafts:
            lines.append(speculation_line(interval.speculation, seconds))
        return lines, is_idle and was_idle


class HitRate:
    """The prefix cache's over recent look-ups."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque()
        self._queries = self._hits = 0

    def add(self, stats: StepStats) -> None:
        if not stats.prefix_cache_queries:
            return
        self._recent.append((stats.prefix_cache_queries, stats.prefix_cache_hits))
        self._queries += stats.prefix_cache_queries
        self._hits += stats.prefix_cache_hits
        if len(self._recent) > RECENT_LOOKUPS:
            queries, hits = self._recent.popleft()
            self._queries -= queries
            self._hits -= hits

    @property
    def percent(self) -> float:
        return 100 * self._hits / self._queries if self._queries else 0.0


def statistics_line(
    engine: int, interval: Interval, latest: StepStats, hit_rate: HitRate, seconds: float, device: str = "cuda"
) -> str:
    """Preemptions are those of the interval; they and deferred requests are named only when there are any. vLLM names
    the GPU in front of the KV cache; on the CPU there is none."""
    place = "" if device == "cpu" else "GPU "
    usage = 100 * latest.kv_blocks_used / max(latest.kv_blocks_total, 1)
    deferred = f", Deferred: {latest.num_deferred} reqs" if latest.num_deferred else ""
    preemptions = f", Preemptions: {interval.preemptions}" if interval.preemptions else ""
    return (
        f"Engine {engine:03d}: Avg prompt throughput: {interval.prompt_tokens / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {interval.generation_tokens / seconds:.1f} tokens/s, "
        f"Running: {latest.num_running} reqs, Waiting: {latest.num_waiting} reqs{deferred}{preemptions}, "
        f"{place}KV cache usage: {usage:.1f}%, Prefix cache hit rate: {hit_rate.percent:.1f}%"
    )


def speculation_line(counts: SpeculationCounts, seconds: float) -> str:
    """vLLM's line about the drafts of an interval, of which there were some."""
    accepted, drafted = counts.num_accepted_tokens, counts.num_draft_tokens
    per_position = ", ".join(f"{count / counts.num_drafts:.3f}" for count in counts.accepted_per_position)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / counts.num_drafts:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, Per-position acceptance rate: {per_position}, "
        f"Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
    )
