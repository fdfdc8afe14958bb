"""Token budget of a step: prefill chunks small enough for decodes and large enough for prompts.

vLLM's guide: "Smaller values (e.g., 2048) achieve better inter-token latency (ITL) because there are fewer prefills
slowing down decodes." "Higher values achieve better time to first token (TTFT) as you can process more prefill tokens
in a batch." "For optimal throughput, we recommend setting max_num_batched_tokens > 8096 especially for smaller models
on large GPUs." Which of them applies depends on objectives and lengths, so it is predicted: the budget with the highest
load within the objectives wins. Percentiles of token gaps are not monotone in the budget, so no gradient is followed.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab_operator.tuner.moves import Expectation, Measure, Move, Reason
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.prediction import Candidate, Predictor
from trimtab_operator.tuner.prediction.capacity import TOLERANCE
from trimtab_operator.tuner.rules.gain import clear_gain, round_significant
from trimtab_operator.tuner.situation import Range, Situation

LADDER = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
GAIN = 1.05  # of the capacity: less is within the engine model's error
GAIN_DEVIATIONS = 3.0  # standard errors of a request's mean work
GAIN_BACK = 1.12  # to reverse within REMEMBERED_SECONDS: a narrow optimum changes with every hour's lengths
BACK_TIMES = 2.0  # factor of the needed gain to reverse
REMEMBERED_SECONDS = 1800.0
REVERSAL_COOLDOWN_SECONDS = 600.0  # without reversals; harmful trials are still reverted
TRIED = (0, 2)  # indices of the budgets on each side that are compared under overload: the next, and a far one
UNSURE = 0.1  # of a capacity
EVIDENCE = {
    Measure.CAPACITY: "capacity",
    Measure.ATTAINMENT: "attainment",
    Measure.GOOD: "good_requests_per_second",
    Measure.TOKENS: "tokens_per_second",
}
"""Name of a measure in the evidence."""


def choose_token_budget(s: Situation) -> Move | None:
    """Change the budget if another one holds clearly more load within the objectives; under overload, if it serves more
    of it.
    """
    found = s.ranges.get(Parameter.MAX_NUM_BATCHED_TOKENS)
    if found is None or s.predictor is None or not found.is_live:
        return None
    predictor, current = s.predictor, int(found.current)
    present = predictor.searched_capacity(_with_budget(s, current))
    if present is None:
        return None  # unknown capacities are not compared, and the replica rule needs them first
    others = [
        b for b in rungs(found) if b != current and not _is_reversal(s, b > current, within=REVERSAL_COOLDOWN_SECONDS)
    ]
    more = _holding_more(s, predictor, others, current, present)
    if more:
        best = max(more, key=lambda budget: more[budget])
        then = more[best]
        gain = Expectation(Measure.CAPACITY, present, then, (1 - UNSURE) * then, (1 + UNSURE) * then)
        return _move(s, current, best, gain, f"a capacity gain of less than {GAIN - 1:.0%}")
    if present >= s.rate:
        return None  # or not all of them are known yet: next step
    return _serving_more(s, predictor, others, current)


def _serving_more(s: Situation, predictor: Predictor, others: list[int], current: int) -> Move | None:
    """Return a move under overload, where no budget holds the load, to a budget with a clear gain."""
    below, above = [b for b in others if b < current][::-1], [b for b in others if b > current]
    tried = [side[index] for side in (below, above) for index in TRIED if index < len(side)]
    present = predictor.at(_with_budget(s, current), s.rate)
    gains = {
        budget: clear_gain(
            s,
            present,
            predictor.at(_with_budget(s, budget), s.rate),
            times=BACK_TIMES if _is_reversal(s, budget > current, within=REMEMBERED_SECONDS) else 1.0,
        )
        for budget in tried
    }
    clear = {budget: gain for budget, gain in gains.items() if gain is not None}
    if not clear:
        return None
    best = max(clear, key=lambda budget: (clear[budget].after, -abs(budget - current)))
    return _move(s, current, best, clear[best], "a gain within the sampling error")


def _move(s: Situation, current: int, best: int, gain: Expectation, would_change: str) -> Move:
    """Return the move. `gain` is the predicted improvement and its reason."""
    evidence = {
        f"{EVIDENCE[gain.measure]}_now": round_significant(gain.before),
        f"{EVIDENCE[gain.measure]}_then": round_significant(gain.after),
        "requests_per_second": round_significant(s.rate),
        "blocked_by_tokens_share": round(s.window.blocked_share("tokens"), 4),
    }
    if s.attained is not None:
        evidence["attained"] = round(s.attained, 4)
    return Move(
        Reason.CHUNKS_TOO_LARGE if best < current else Reason.CHUNKS_TOO_SMALL,
        Parameter.MAX_NUM_BATCHED_TOKENS,
        current,
        best,
        evidence,
        (gain,),
        f"{would_change}, or with other request lengths or objectives",
    )


def _holding_more(
    s: Situation, predictor: Predictor, others: list[int], current: int, present: float
) -> dict[int, float] | None:
    """Return the capacities of budgets that hold clearly more than the present one and the arrival rate; None while
    unknown.

    Each further budget must hold more than the best so far: most are excluded after one probe.
    """
    found: dict[int, float] = {}
    for budget in sorted(others, key=lambda budget: -predictor.known_capacity(_with_budget(s, budget))):
        best = max(found.values(), default=0.0)
        least = max(_gain(s, budget > current) * present, (1 + TOLERANCE) * best, s.rate)
        holds_load = predictor.holds_rate(_with_budget(s, budget), least)
        if holds_load is None:
            return None
        if holds_load:
            capacity = predictor.searched_capacity(_with_budget(s, budget))
            if capacity is None:
                return None
            if capacity >= least:
                found[budget] = capacity
    return found


def _gain(s: Situation, is_raise: bool) -> float:
    """Return the capacity factor that a move in this direction needs: beyond the sampling error of the lengths, and
    twice that to reverse.
    """
    assert s.predictor is not None
    gain = max(GAIN, 1.0 + GAIN_DEVIATIONS * s.predictor.sampling_error)
    turns_back = _is_reversal(s, is_raise, within=REMEMBERED_SECONDS)
    return max(GAIN_BACK, 1.0 + BACK_TIMES * (gain - 1.0)) if turns_back else gain


def _is_reversal(s: Situation, is_raise: bool, *, within: float) -> bool:
    """Return True if a move in this direction would reverse one made within that many seconds."""
    moves = [entry for entry in s.state.history if entry.move.target is Parameter.MAX_NUM_BATCHED_TOKENS]
    return bool(moves) and moves[-1].move.is_raise != is_raise and s.now - moves[-1].at < within


def rungs(found: Range) -> list[int]:
    """Return the budgets to compare: powers of two within the range, the present one and the range's ends."""
    ends = {int(found.current), int(found.highest)}
    inside = {rung for rung in LADDER if found.lowest <= rung <= found.highest}
    return sorted({rung for rung in inside | ends if found.lowest <= rung <= found.highest} | {int(found.current)})


def _with_budget(s: Situation, budget: int) -> Candidate:
    """Return the candidate with this budget and the starting replicas: a change for only the minutes until they serve
    would be reverted.
    """
    return replace(s.with_parameter(Parameter.MAX_NUM_BATCHED_TOKENS, budget), replicas=max(1, s.replicas + s.starting))
