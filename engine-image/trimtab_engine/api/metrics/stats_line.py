"""vLLM's periodic statistics log line: throughput since the last line, and current load."""

from collections import deque

from trimtab_engine.messages.requests import SpeculationCounts, StepStats

RECENT_LOOKUPS = 1000  # steps with lookups in the hit rate; vLLM uses as many requests


class Interval:
    """Sums since the last line. Prompt tokens are computed ones, not prefix cache hits."""

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
    """Statistics of one core's steps, formatted as log lines. Call take() only after the first step."""

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
        """Return the lines of the last `seconds` (a second line if there were drafts), and True if they can be skipped:
        nothing happened in this or the last interval, and no request waits.
        """
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
    """Prefix cache hit rate over recent lookups."""

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
    """Return the line. Preemptions of the interval and deferred requests appear only if there are any. vLLM prints GPU
    before KV cache; on the CPU it is omitted.
    """
    place = "" if device == "cpu" else "GPU "
    usage = 100 * latest.kv_blocks_used / max(latest.kv_blocks_total, 1)
    deferred = f", Deferred: {latest.num_deferred} reqs" if latest.num_deferred else ""
    preemptions = f", Preemptions: {interval.preemptions}" if interval.preemptions else ""
    return (
        f"Engine {engine:03d}: Avg prompt throughput: {interval.prompt_tokens / seconds:.1f} tokens/s, Avg generation "
        f"throughput: {interval.generation_tokens / seconds:.1f} tokens/s, Running: {latest.num_running} reqs, "
        f"Waiting: {latest.num_waiting} reqs{deferred}{preemptions}, {place}KV cache usage: {usage:.1f}%, Prefix cache "
        f"hit rate: {hit_rate.percent:.1f}%"
    )


def speculation_line(counts: SpeculationCounts, seconds: float) -> str:
    """Return vLLM's line about the drafts of an interval; there must be at least one."""
    accepted, drafted = counts.num_accepted_tokens, counts.num_draft_tokens
    per_position = ", ".join(f"{count / counts.num_drafts:.3f}" for count in counts.accepted_per_position)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / counts.num_drafts:.2f}, Accepted throughput: "
        f"{accepted / seconds:.2f} tokens/s, Drafted throughput: {drafted / seconds:.2f} tokens/s, Accepted: "
        f"{accepted} tokens, Drafted: {drafted} tokens, Per-position acceptance rate: {per_position}, Avg Draft "
        f"acceptance rate: {100 * accepted / drafted:.1f}%"
    )
