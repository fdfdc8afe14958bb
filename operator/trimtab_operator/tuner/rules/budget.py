"""The token budget of a step: chunks small enough for decodes, large enough for prompts.

The guide: "Smaller values (e.g., 2048) achieve better inter-token latency (ITL) because there are fewer prefills
slowing down decodes." "Higher values achieve better time to first token (TTFT) as you can process more prefill tokens
in a batch." "For optimal throughput, we recommend setting max_num_batched_tokens > 8096 especially for smaller models
on large GPUs." Which of them holds depends on promises and lengths, so it is predicted: that budget wins under which
the most load keeps its promises. Percentiles of token gaps are not monotone in the budget, so no gradient is followed.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab_operator.tuner.knobs import Knob
from trimtab_operator.tuner.moves import Expectation, Measure, Move, Reason
from trimtab_operator.tuner.prediction import Candidate, Foresight
from trimtab_operator.tuner.prediction.capacity import TOLERANCE
from trimtab_operator.tuner.rules.gain import clear_gain, rounded
from trimtab_operator.tuner.situation import Range, Situation

LADDER = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
GAIN = 1.05  # of the capacity: less is within the twin's noise
GAIN_DEVIATIONS = 3.0  # standard errors of a request's mean work, likewise
GAIN_BACK = 1.12  # to turn back within REMEMBERED_SECONDS: what is best by a little changes with every hour's lengths
BACK_TIMES = 2.0  # the gain that a move must bring otherwise, likewise
REMEMBERED_SECONDS = 1800.0
REVERSAL_COOLDOWN_SECONDS = 600.0  # in which it does not turn back: a trial that does harm is undone without it
TRIED = (0, 2)  # budgets on each side of the present one that are compared under overload: the next, and a far one
UNSURE = 0.1  # of a capacity
EVIDENCE = {
    Measure.CAPACITY: "capacity",
    Measure.ATTAINMENT: "attainment",
    Measure.GOOD: "good_requests_per_second",
    Measure.TOKENS: "tokens_per_second",
}
"""What a measure is called as evidence."""


def better_budget(s: Situation) -> Move | None:
    """Another budget holds clearly more load within the promises; where none holds what comes, it serves more of it."""
    found = s.ranges.get(Knob.MAX_NUM_BATCHED_TOKENS)
    if found is None or s.foresight is None or not found.is_live:
        return None
    foresight, current = s.foresight, int(found.current)
    present = foresight.capacity_later(_with(s, current))
    if present is None or (s.settings.scaling is not None and foresight.capacity_later(_some(s)) is None):
        return None  # nothing is compared with what is not known yet, and replicas are asked for by it first
    others = [
        b for b in rungs(found) if b != current and not _turns_back(s, b > current, within=REVERSAL_COOLDOWN_SECONDS)
    ]
    more = _holding_more(s, foresight, others, current, present)
    if more:
        best = max(more, key=lambda budget: more[budget])
        then = more[best]
        gain = Expectation(Measure.CAPACITY, present, then, (1 - UNSURE) * then, (1 + UNSURE) * then)
        return _move(s, current, best, gain, f"a gain of less than {GAIN - 1:.0%} in the load that is held")
    if present >= s.rate:
        return None  # or not all of them are known yet: next turn
    return _serving_more(s, foresight, others, current)


def _serving_more(s: Situation, foresight: Foresight, others: list[int], current: int) -> Move | None:
    """Under overload, where no budget holds what comes: one under which clearly more is gained of what decides."""
    below, above = [b for b in others if b < current][::-1], [b for b in others if b > current]
    tried = [side[index] for side in (below, above) for index in TRIED if index < len(side)]
    present = foresight.at(_with(s, current), s.rate)
    gains = {
        budget: clear_gain(
            s,
            present,
            foresight.at(_with(s, budget), s.rate),
            times=BACK_TIMES if _turns_back(s, budget > current, within=REMEMBERED_SECONDS) else 1.0,
        )
        for budget in tried
    }
    clear = {budget: gain for budget, gain in gains.items() if gain is not None}
    if not clear:
        return None
    best = max(clear, key=lambda budget: (clear[budget].after, -abs(budget - current)))
    return _move(s, current, best, clear[best], "a gain that chance may have made")


def _move(s: Situation, current: int, best: int, gain: Expectation, would_change: str) -> Move:
    """`gain`: what is predicted to become more, and the reason for it."""
    evidence = {
        f"{EVIDENCE[gain.measure]}_now": rounded(gain.before),
        f"{EVIDENCE[gain.measure]}_then": rounded(gain.after),
        "requests_per_second": rounded(s.rate),
        "blocked_by_tokens_share": round(s.window.blocked_share("tokens"), 4),
    }
    if s.attained is not None:
        evidence["attained"] = round(s.attained, 4)
    return Move(
        Reason.CHUNKS_TOO_LARGE if best < current else Reason.CHUNKS_TOO_SMALL,
        Knob.MAX_NUM_BATCHED_TOKENS,
        current,
        best,
        evidence,
        (gain,),
        f"{would_change}, as with other lengths or promises",
    )


def _holding_more(
    s: Situation, foresight: Foresight, others: list[int], current: int, present: float
) -> dict[int, float] | None:
    """Budgets that hold clearly more than the present one, and what comes, with their capacities. Once one is known to,
    the next must hold more than it: most are out after one look. None: it is not known yet."""
    found: dict[int, float] = {}
    for budget in sorted(others, key=lambda budget: -foresight.as_known(_with(s, budget))):
        best = max(found.values(), default=0.0)
        least = max(_gain(s, budget > current) * present, (1 + TOLERANCE) * best, s.rate)
        holds_load = foresight.attains_later(_with(s, budget), least)
        if holds_load is None:
            return None
        if holds_load:
            capacity = foresight.capacity_later(_with(s, budget))
            if capacity is None:
                return None
            if capacity >= least:
                found[budget] = capacity
    return found


def _gain(s: Situation, is_raise: bool) -> float:
    """How much more must be held for a move in this direction: more than the lengths that are known can tell apart, and
    twice that to turn back."""
    assert s.foresight is not None
    gain = max(GAIN, 1.0 + GAIN_DEVIATIONS * s.foresight.sampling_error)
    turns_back = _turns_back(s, is_raise, within=REMEMBERED_SECONDS)
    return max(GAIN_BACK, 1.0 + BACK_TIMES * (gain - 1.0)) if turns_back else gain


def _turns_back(s: Situation, is_raise: bool, *, within: float) -> bool:
    """Whether a move in this direction would turn back from one that was made within so many seconds."""
    moves = [entry for entry in s.memory.history if entry.move.target is Knob.MAX_NUM_BATCHED_TOKENS]
    return bool(moves) and moves[-1].move.is_raise != is_raise and s.now - moves[-1].at < within


def rungs(found: Range) -> list[int]:
    """Budgets to compare: powers of two within the range, the present one and the range's ends."""
    ends = {int(found.current), int(found.highest)}
    inside = {rung for rung in LADDER if found.lowest <= rung <= found.highest}
    return sorted({rung for rung in inside | ends if found.lowest <= rung <= found.highest} | {int(found.current)})


def _some(s: Situation) -> Candidate:
    """Two of what runs: what they hold is between what one holds and what many do."""
    return replace(s.candidate, replicas=2)


def _with(s: Situation, budget: int) -> Candidate:
    """The replicas that will serve when those that start do: a change for the minutes until then would be undone."""
    return replace(s.with_knob(Knob.MAX_NUM_BATCHED_TOKENS, budget), replicas=max(1, s.replicas + s.coming))
