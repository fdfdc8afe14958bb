"""How many drafts were made and how many stood: counting only, for metrics and the statistics line."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationCounts:
    """Sums over requests and steps. A "draft" is one request's guesses in one step, as in vLLM's metrics."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """How many drafts stood at least up to each position; as long as the longest draft."""

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    def note(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One request's drafts of one step, and how many of them stood."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self._lengthen(num_draft_tokens)
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def add(self, num_drafts: int, num_draft_tokens: int, accepted_per_position: Sequence[int]) -> None:
        """Another sum."""
        self.num_drafts += num_drafts
        self.num_draft_tokens += num_draft_tokens
        self._lengthen(len(accepted_per_position))
        for position, count in enumerate(accepted_per_position):
            self.accepted_per_position[position] += count

    def _lengthen(self, length: int) -> None:
        self.accepted_per_position += [0] * (length - len(self.accepted_per_position))


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
