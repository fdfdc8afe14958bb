"""Sequence slots (`max_num_seqs`): how many requests run at once.

vLLM's guide lowers `max_num_seqs` on preemptions. Measured, that ends them by making users wait: nine slots of 32
reduced preemptions from 68 to 7, and raised the median TTFT from 1.5 to 9 s. It is therefore lowered only when the
running batch itself exceeds the ITL objective, never because of a count of preemptions.
"""

from __future__ import annotations

import math

from trimtab_operator.tuner.moves import Expectation, Measure, Move, Reason
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.rules.gain import clear_gain, deciding_measure, is_harm
from trimtab_operator.tuner.rules.pressure import is_pressed, peak_usage
from trimtab_operator.tuner.situation import Situation

NEEDED_FACTOR = 1.1  # of the sequences that the arrival rate needs
BLOCKED_SHARE = 0.05  # of the time that the queue waits for a sequence slot
MORE = 1.5  # factor of the slots per step
KV_AT_MOST = 0.9  # KV cache usage after more are admitted
SOONER = 0.05  # predicted reduction of TTFT p95 that more slots must bring


def lower_max_num_seqs(s: Situation) -> Move | None:
    """Lower the slots if the batch itself violates the ITL objective: decode steps are too slow without prefill, or the
    batch does not fit into the KV cache and preempted requests stall.
    """
    found = s.ranges.get(Parameter.MAX_NUM_SEQS)
    decode = s.window.decode
    if s.objectives.itl is None or s.predictor is None or found is None or decode is None or decode.steps < 1:
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
    present = s.predict(s.candidate)
    assert present is not None or s.rate <= 0
    if present is None or fit < 1:
        return None
    least = max(float(found.lowest), 1.0)
    tried = {max(least, min(float(found.current), value)) for value in (fit, 0.85 * fit, NEEDED_FACTOR * fit)}
    shares = {
        int(slots): s.predictor.at(s.with_parameter(Parameter.MAX_NUM_SEQS, int(slots)), s.rate) for slots in tried
    }
    best = max(shares, key=lambda slots: (shares[slots].good_share, slots))
    expected = clear_gain(s, present, shares[best])
    if best >= found.current or expected is None or expected.measure is Measure.TOKENS:
        return None  # only an objective justifies making other requests wait
    return Move(
        Reason.BATCH_TOO_LARGE,
        Parameter.MAX_NUM_SEQS,
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
        f"decode steps within {target * 1000:.0f} ms"
        if step > target
        else "a KV cache that holds all running requests",
    )


def raise_max_num_seqs(s: Situation) -> Move | None:
    """Raise the slots if the queue waits for one while KV is free. Counterpart of `lower_max_num_seqs`.

    vLLM's guide: "Higher values achieve better time to first token (TTFT) as you can process more" at once.
    """
    found = s.ranges.get(Parameter.MAX_NUM_SEQS)
    if found is None or s.window.blocked_share("seqs") < BLOCKED_SHARE:
        return None
    after = min(int(found.highest), math.ceil(MORE * found.current))
    if after <= found.current or not found.is_live or peak_usage(s) * after / found.current > KV_AT_MOST:
        return None
    expected: tuple[Expectation, ...] = ()
    present, then = s.predict(s.candidate), s.predict(s.with_parameter(Parameter.MAX_NUM_SEQS, after))
    if present is not None and then is not None:
        if is_harm(s, present, then) or then.ttft_p95 > (1 - SOONER) * present.ttft_p95:
            return None
        low, high = then.interval(then.ttft_p95, 0.0)
        sooner = Expectation(Measure.TTFT_P95, present.ttft_p95, then.ttft_p95, low, high)
        expected = (sooner, deciding_measure(s, present, then))
    return Move(
        Reason.TOO_FEW_SEQUENCE_SLOTS,
        Parameter.MAX_NUM_SEQS,
        found.current,
        after,
        {
            "blocked_by_slots_share": round(s.window.blocked_share("seqs"), 4),
            "kv_usage": round(peak_usage(s), 4),
            "waiting": round(s.window.gauges.waiting, 2),
        },
        expected,
        f"less than {BLOCKED_SHARE:.0%} of the time spent waiting for a sequence slot, or a fuller KV cache",
    )
