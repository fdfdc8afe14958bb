"""Counting drafts: sums by position, and vLLM's line."""

from trimtab_engine.api.metrics.stats_line import speculation_line
from trimtab_engine.messages.requests import SpeculationCounts


def test_accepted_drafts_are_counted_by_position() -> None:
    counts = SpeculationCounts()
    counts.note(3, 2)
    counts.note(3, 0)
    counts.note(1, 1)
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (3, 7, 3)
    assert counts.accepted_per_position == [2, 1, 0]


def test_sums_of_different_length_add_up() -> None:
    counts = SpeculationCounts()
    counts.add(1, 2, [1, 0])
    counts.add(2, 6, [2, 2, 1])
    assert (counts.num_drafts, counts.num_draft_tokens, counts.accepted_per_position) == (3, 8, [3, 2, 1])


def test_the_line_is_vllms() -> None:
    counts = SpeculationCounts(num_drafts=10, num_draft_tokens=30, accepted_per_position=[8, 6, 4])
    assert speculation_line(counts, 2.0) == (
        "SpecDecoding metrics: Mean acceptance length: 2.80, Accepted throughput: 9.00 tokens/s, Drafted throughput: "
        "15.00 tokens/s, Accepted: 18 tokens, Drafted: 30 tokens, Per-position acceptance rate: 0.800, 0.600, 0.400, "
        "Avg Draft acceptance rate: 60.0%"
    )
