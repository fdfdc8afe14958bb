"""Seats: how many requests run at once.

The guide lowers `max_num_seqs` on preemptions. Measured, that ends them by making users wait: nine seats of 32 took
preemptions from 68 to 7, and the median first token from 1.5 to 9 s. So it is lowered only where the running batch
itself is slower than the inter-token promise, and never because of a count of preemptions.
"""

from __future__ import annotations

import math

from trimtab_operator.tuner.knobs import Knob
from trimtab_operator.tuner.moves import Expectation, Measure, Move, Reason
from trimtab_operator.tuner.rules.gain import clear_gain, is_harm, what_decides
from trimtab_operator.tuner.rules.pressure import is_pressed, peak_usage
from trimtab_operator.tuner.situation import Situation

NEEDED_FACTOR = 1.1  # of the sequences that must run for what comes to be served
BLOCKED_SHARE = 0.05  # of the time that the queue waits for a seat
MORE = 1.5  # times the seats, at a step
KV_AT_MOST = 0.9  # of the cache in use after more are admitted
SOONER = 0.05  # by which slow first tokens must come sooner, by prediction, for more seats


def fewer_seats(s: Situation) -> Move | None:
    """The inter-token promise is missed by the batch itself: a step of it is too slow with no prefill in it, or it does
    not fit into the KV cache, and what is preempted stalls amid its answer. Let fewer run at once."""
    found = s.ranges.get(Knob.MAX_NUM_SEQS)
    decode = s.window.decode
    if s.objectives.itl is None or s.foresight is None or found is None or decode is None or decode.steps < 1:
        return None
    running, context = decode.sequences / decode.steps, decode.context / max(1.0, decode.sequences)
    step = s.cost.seconds(round(running), round(running), round(running * context), round(running * context))
    target = s.objectives.itl.seconds
    if step <= target and not is_pressed(s):
        return None
    each = s.cost.per_token + s.cost.per_sequence + (s.cost.per_context + s.cost.per_attended) * context
    fit = math.floor((target - s.cost.per_step) / each) if each > 0 else 0
    if step <= target:
        fit = math.floor(s.ledger.kv_tokens / max(1.0, context))
    present = s.predicted(s.candidate)
    assert present is not None or s.rate <= 0
    if present is None or fit < 1:
        return None
    least = max(float(found.lowest), 1.0)
    tried = {max(least, min(float(found.current), value)) for value in (fit, 0.85 * fit, NEEDED_FACTOR * fit)}
    shares = {int(seats): s.foresight.at(s.with_knob(Knob.MAX_NUM_SEQS, int(seats)), s.rate) for seats in tried}
    best = max(shares, key=lambda seats: (shares[seats].good_share, seats))
    expected = clear_gain(s, present, shares[best])
    if best >= found.current or expected is None or expected.measure is Measure.TOKENS:
        return None  # only a promise may have others wait for the sake of what runs
    return Move(
        Reason.BATCH_TOO_LARGE,
        Knob.MAX_NUM_SEQS,
        found.current,
        best,
        {
            "decode_step_seconds": round(step, 7),
            "itl_target_seconds": target,
            "running": round(running, 2),
            "context_tokens": round(context, 1),
            "requests_per_second": round(s.rate, 4),
        },
        (expected,),
        f"decode steps within {target * 1000:.0f} ms" if step > target else "room for all that runs",
    )


def more_seats(s: Situation) -> Move | None:
    """The queue waits for a seat while KV is free: too few may run. The twin of `fewer_seats`.

    The guide: "Higher values achieve better time to first token (TTFT) as you can process more" at once.
    """
    found = s.ranges.get(Knob.MAX_NUM_SEQS)
    if found is None or s.window.blocked_share("seqs") < BLOCKED_SHARE:
        return None
    after = min(int(found.highest), math.ceil(MORE * found.current))
    if after <= found.current or not found.is_live or peak_usage(s) * after / found.current > KV_AT_MOST:
        return None
    expected: tuple[Expectation, ...] = ()
    present, then = s.predicted(s.candidate), s.predicted(s.with_knob(Knob.MAX_NUM_SEQS, after))
    if present is not None and then is not None:
        if is_harm(s, present, then) or then.ttft_p95 > (1 - SOONER) * present.ttft_p95:
            return None
        low, high = then.interval(then.ttft_p95, 0.0)
        sooner = Expectation(Measure.TTFT_P95, present.ttft_p95, then.ttft_p95, low, high)
        expected = (sooner, what_decides(s, present, then))
    return Move(
        Reason.TOO_FEW_SEATS,
        Knob.MAX_NUM_SEQS,
        found.current,
        after,
        {
            "blocked_by_seats_share": round(s.window.blocked_share("seqs"), 4),
            "kv_usage": round(peak_usage(s), 4),
            "waiting": round(s.window.gauges.waiting, 2),
        },
        expected,
        f"less than {BLOCKED_SHARE:.0%} of the time spent waiting for a seat, or a fuller KV cache",
    )
