"""The first replica of a change beside those that still run what was there before: is it worse for users? Pure.

What is compared are requests that ended since it serves, each told once by its engine. Only what is clearly worse
counts: a change that makes things slower may be what its owner wants, one that fails requests is not. Times are
compared where the model is the same, and only of requests whose prompts were computed: a new engine's prefix cache is
empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from trimtab_operator.observed.engines import EngineSeen
from trimtab_operator.tuner.samples import Finished

LEAST_REQUESTS = 30  # on either side: of fewer, nothing can be said
LEAST_ERRORS = 3
ERRORS_WORSE = 0.05  # share of the requests, more than with the others
TIMES_WORSE = 2.0  # times the median of the others …
TTFT_WORSE_SECONDS = 0.1  # … and so much more, which people notice
GAP_WORSE_SECONDS = 0.01
PREEMPTIONS_WORSE = 0.5  # a request, more than with the others, and TIMES_WORSE as many
CACHED_SHARE = 0.1  # of a prompt: with more of it cached, the time to the first token says nothing of the engine
KEEP = 2000  # requests of either side


@dataclass(frozen=True, slots=True)
class Comparison:
    """The requests that ended since the first replica of `change` serves: its own, and those of the others."""

    change: str
    new: tuple[Finished, ...] = ()
    old: tuple[Finished, ...] = ()

    def later(self, engines: Mapping[str, EngineSeen], new: Collection[str], old: Collection[str]) -> Comparison:
        """With what these groups, by name, told in one more look."""
        return replace(
            self, new=(*self.new, *_told(engines, new))[-KEEP:], old=(*self.old, *_told(engines, old))[-KEEP:]
        )


def _told(engines: Mapping[str, EngineSeen], names: Collection[str]) -> Iterable[Finished]:
    for name in sorted(names):
        sample = engines[name].sample if name in engines else None
        if sample is not None and sample.requests is not None:
            yield from sample.requests.finished


def worse(found: Comparison, *, is_same_model: bool) -> str | None:
    """What is clearly worse for users of the change, with its numbers; None where nothing is."""
    if min(len(found.new), len(found.old)) < LEAST_REQUESTS:
        return None
    said = _errors(found) or _preemptions(found)
    return said or (_first_tokens(found) or _gaps(found) if is_same_model else None)


def _errors(found: Comparison) -> str | None:
    new, old = _share_of_errors(found.new), _share_of_errors(found.old)
    if new * len(found.new) >= LEAST_ERRORS and new > old + ERRORS_WORSE:
        return f"{new:.0%} of its {len(found.new)} requests ended with an error, {old:.0%} of the others'"
    return None


def _share_of_errors(rows: Sequence[Finished]) -> float:
    return sum(row.reason == "error" for row in rows) / len(rows)


def _preemptions(found: Comparison) -> str | None:
    new, old = (sum(row.preemptions for row in rows) / len(rows) for rows in (found.new, found.old))
    if new > old + PREEMPTIONS_WORSE and new > TIMES_WORSE * old:
        return f"its requests were preempted {new:.1f} times each, the others' {old:.1f} times"
    return None


def _first_tokens(found: Comparison) -> str | None:
    new, old = _ttfts(found.new), _ttfts(found.old)
    return _slower(new, old, TTFT_WORSE_SECONDS, "the median time to the first token is")


def _ttfts(rows: Iterable[Finished]) -> list[float]:
    computed = (row for row in rows if row.cached_tokens <= CACHED_SHARE * row.prompt_tokens)
    return [row.ttft_seconds for row in computed if row.ttft_seconds is not None]


def _gaps(found: Comparison) -> str | None:
    new, old = ([row.mean_gap for row in rows if row.mean_gap is not None] for rows in (found.new, found.old))
    return _slower(new, old, GAP_WORSE_SECONDS, "the median time between two tokens is")


def _slower(new: Sequence[float], old: Sequence[float], least: float, what: str) -> str | None:
    if min(len(new), len(old)) < LEAST_REQUESTS:
        return None
    after, before = median(new), median(old)
    if after > TIMES_WORSE * before and after > before + least:
        return f"{what} {after:.3f} s, with the others {before:.3f} s"
    return None
