"""The first replica of a change beside the others: what is clearly worse is told with its numbers, nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from trimtab_operator.observed.engines import EngineSeen
from trimtab_operator.rollout.canary_comparison import KEEP, LEAST_REQUESTS, Comparison, worse
from trimtab_operator.tuner.samples import Counters, Finished, Gauges, RequestNews, Sample


def requests(count: int = 40, **changes: Any) -> tuple[Finished, ...]:
    """So many requests that took 0.2 s to the first token and 20 ms from token to token."""
    row = {"prompt_tokens": 100, "output_tokens": 11, "ttft_seconds": 0.2, "decode_seconds": 0.2, **changes}
    return tuple(Finished(arrived_at=0.0, finished_at=1.0, **row) for _ in range(count))


FINE = requests()
BROKEN = (*requests(35), *requests(5, reason="error"))


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (FINE, None),
        (BROKEN, "12% of its 40 requests ended with an error, 0% of the others'"),
        ((*requests(38), *requests(2, reason="error")), None),  # two may be anything
        (requests(preemptions=1), "its requests were preempted 1.0 times each, the others' 0.0 times"),
        (requests(ttft_seconds=0.5), "the median time to the first token is 0.500 s, with the others 0.200 s"),
        (requests(ttft_seconds=0.39), None),  # slower, not clearly
        (requests(decode_seconds=0.5), "the median time between two tokens is 0.050 s, with the others 0.020 s"),
        (requests(LEAST_REQUESTS - 1, ttft_seconds=9.0), None),  # too few to say
        (requests(reason="abort", output_tokens=1, decode_seconds=None), None),  # clients that went away
    ],
)
def test_what_is_clearly_worse_is_told(new: tuple[Finished, ...], said: str | None) -> None:
    assert worse(Comparison("c", new, FINE), is_same_model=True) == said


def test_errors_that_the_others_have_too_are_not_the_changes() -> None:
    assert worse(Comparison("c", BROKEN, BROKEN), is_same_model=True) is None


def test_another_model_may_take_its_time_but_not_fail() -> None:
    assert worse(Comparison("c", requests(ttft_seconds=9.0, decode_seconds=9.0), FINE), is_same_model=False) is None
    assert worse(Comparison("c", BROKEN, FINE), is_same_model=False) is not None


def test_prompts_that_only_the_old_engines_have_in_their_caches_are_not_compared() -> None:
    cached = requests(cached_tokens=90, ttft_seconds=0.01)
    assert worse(Comparison("c", FINE, cached), is_same_model=True) is None


def test_requests_are_taken_from_whoever_told_them_and_not_without_end() -> None:
    def telling(rows: tuple[Finished, ...]) -> EngineSeen:
        sample = Sample(1.0, Counters(0, 0, 0, {}), Gauges(0, 0, 0.0), requests=RequestNews(rows, ()))
        return EngineSeen(True, sample=sample)

    engines = {"m-g0": telling(FINE), "m-g1": telling(BROKEN), "m-g2": EngineSeen(True, "no answer")}
    found = Comparison("c").later(engines, {"m-g1", "m-g2"}, {"m-g0", "m-g3"})
    assert (found.new, found.old) == (BROKEN, FINE)
    for _ in range(60):
        found = found.later(engines, {"m-g1"}, {"m-g0"})
    assert (len(found.new), len(found.old)) == (KEEP, KEEP)
