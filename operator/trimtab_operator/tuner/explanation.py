"""Decisions as sentences with their numbers, for status, Events, the log and `trimtab why`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from trimtab_operator.tuner.load.season import DAY_SECONDS
from trimtab_operator.tuner.moves import Decision, Expectation, Measure, Move, Reason, ReplicaCount, Restart
from trimtab_operator.tuner.parameters import Value
from trimtab_operator.tuner.settings import Mode

MIB = 1 << 20
MAX_EXTRA_DIGITS = 9  # added to the usual digits until two figures differ

GUIDE: Mapping[Reason, str] = {
    Reason.KV_CACHE_TOO_SMALL: "Increase gpu_memory_utilization. […] By increasing utilization, you can provide more "
    "KV cache space.",
    Reason.ADMITTED_TOO_EARLY: "This reduces the number of concurrent requests in a batch, thereby requiring less KV "
    "cache space.",
    Reason.CHUNKS_TOO_LARGE: "Smaller values (e.g., 2048) achieve better inter-token latency (ITL) because there are "
    "fewer prefills slowing down decodes.",
    Reason.CHUNKS_TOO_SMALL: "Higher values achieve better time to first token (TTFT) as you can process more prefill "
    "tokens in a batch.",
    Reason.BATCH_TOO_LARGE: "Decrease max_num_seqs […]. This reduces the number of concurrent requests in a batch.",
    Reason.TOO_FEW_SEQUENCE_SLOTS: "You can process more […] in a batch.",
    Reason.TOO_FEW_REPLICAS: "When you need to scale throughput rather than model size (data parallelism).",
    Reason.TOO_MANY_REPLICAS: "When you have enough GPUs to replicate the entire model (data parallelism).",
    Reason.SATURATED: "Increase tensor_parallel_size. […] Increase pipeline_parallel_size.",
}
"""Sentence of vLLM's optimization guide that supports each rule; safety and reverting reasons have none."""


def sentence_of(move: Move, mode: Mode) -> str:
    """Return the decision as one sentence: change, evidence, prediction, and the condition for a different decision."""
    parts = [_FORMATTERS[move.reason](move, mode)]
    parts += [_expected(entry) for entry in move.expected[:2]]
    if move.would_change:
        parts.append(f"would be different with {move.would_change}")
    return "; ".join(parts) + "."


def why(history: tuple[Decision, ...], recommendation: Decision | None) -> str:
    """Return the output of `trimtab why`: each decision with id, evidence, prediction, guideline and outcome, newest
    first.
    """
    if not history and recommendation is None:
        return "No decisions yet: objectives are attained, nothing is preempted, and the replica count fits the load."
    lines: list[str] = []
    if recommendation is not None:
        lines += ["Recommended:", *_decision_lines(recommendation), ""]
    for decision in reversed(history):
        lines += [*_decision_lines(decision), ""]
    return "\n".join(lines).rstrip()


def _decision_lines(decision: Decision) -> list[str]:
    lines = [f"[{decision.id}] {decision.reason.value}: {decision.sentence}"]
    move = decision.move
    lines += [f"    evidence: {name.replace('_', ' ')} {_number(value)}" for name, value in move.evidence.items()]
    lines += [f"    predicted: {describe_expectation(entry)}" for entry in move.expected]
    guide = GUIDE.get(decision.reason)
    if guide is not None:
        lines.append(f'    guideline: "{guide}"')
    if decision.outcome:
        lines.append(f"    outcome: {decision.outcome}")
    return lines


def describe_expectation(entry: Expectation) -> str:
    """Return a prediction with its interval: measure, value before, value after."""
    interval = (
        ""
        if math.isinf(entry.high)
        else f" (between {show_amount(entry.measure, entry.low)} and {show_amount(entry.measure, entry.high)})"
    )
    before, after = show_amount(entry.measure, entry.before), show_amount(entry.measure, entry.after)
    change = f"stays at {after}" if before == after else f"from {before} to {after}"
    return f"{entry.measure.value} {change}{interval}"


# --- the parts of a sentence ------------------------------------------------------------------------------------------


def show(value: Value | None) -> str:
    """Return a parameter's value for display: 0.86, 2,048."""
    if value is None:
        return "nothing"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}".rstrip("0").rstrip(".")


def _change(move: Move, mode: Mode) -> str:
    done = mode is Mode.AUTO
    verb = ("Raised" if done else "Raise") if move.is_raise else ("Lowered" if done else "Lower")
    return f"{verb} {move.target.value} from {show(move.before)} to {show(move.after)}"


def _preemption(move: Move) -> str:
    recomputed, count = move.evidence["recomputed_share"], int(move.evidence["preemptions"])
    noun = "preemption" if count == 1 else "preemptions"
    return f"{percent(recomputed)} of tokens were recomputed ({count:,} {noun} in the last minute)"


def _kv_too_small(move: Move, mode: Mode) -> str:
    headroom = move.evidence["headroom_bytes"] / MIB
    return (
        f"{_change(move, mode)}: {_preemption(move)} and the device has {headroom:,.0f} MiB of headroom, "
        f"about {int(move.evidence['kv_tokens_gained']):,} more KV tokens"
    )


def _admitted_too_early(move: Move, mode: Mode) -> str:
    return f"{_change(move, mode)}: {_preemption(move)} and the device has no headroom"


def _kv_larger(move: Move, mode: Mode) -> str:
    return (
        f"{_change(move, mode)}: no preemption for {move.evidence['quiet_seconds'] / 60:.0f} minutes, with KV cache "
        f"usage of at most {move.evidence['kv_peak']:.0%}"
    )


def _watermark_not_needed(move: Move, mode: Mode) -> str:
    return f"{_change(move, mode)}: no preemption for {move.evidence['quiet_seconds'] / 60:.0f} minutes"


def _budget(move: Move, mode: Mode) -> str:
    name = next((name for name in _GAINS if f"{name}_then" in move.evidence), "capacity")
    now, then = move.evidence[f"{name}_now"], move.evidence[f"{name}_then"]
    before, after = format_distinct(now, then, percent if name == "attainment" else figure)
    rate = figure(move.evidence["requests_per_second"])
    return f"{_change(move, mode)}: {_GAINS[name].format(now=before, then=after)}; {rate} requests/s arrive"


_GAINS: Mapping[str, str] = {
    "capacity": "{then} requests/s within the objectives instead of {now}",
    "attainment": "{then} of requests within the objectives instead of {now}",
    "good_requests_per_second": "{then} requests/s within the objectives instead of {now}",
    "tokens_per_second": "{then} tokens/s instead of {now}, and no objective is set",
}
"""Predicted gain of another token budget, by the name of the evidence."""


def _batch_too_large(move: Move, mode: Mode) -> str:
    step, target = move.evidence["decode_step_seconds"] * 1000, move.evidence["itl_target_seconds"] * 1000
    running = f"{move.evidence['running']:.0f} requests"
    if step <= target:
        return (
            f"{_change(move, mode)}: the KV cache does not hold {running}, and preempted requests stall; the ITL "
            f"objective is {figure(target)} ms"
        )
    measured, objective = format_distinct(step, target, figure)
    return f"{_change(move, mode)}: a decode step of {running} takes {measured} ms; the ITL objective is {objective} ms"


def _too_few_slots(move: Move, mode: Mode) -> str:
    return (
        f"{_change(move, mode)}: the queue waits for a sequence slot {move.evidence['blocked_by_slots_share']:.0%} of "
        f"the time while {1 - move.evidence['kv_usage']:.0%} of the KV cache is free"
    )


def _replicas(move: Move, mode: Mode) -> str:
    if not move.expected:
        return f"{_change(move, mode)}: no request arrived for a minute, and none is in flight"
    rate, provisioned = move.evidence["requests_per_second"], move.evidence["provisioned_per_second"]
    return (
        f"{_change(move, mode)}: {rate:.3g} requests/s arrive, and {provisioned:.3g} requests/s must be served once a "
        f"new replica is ready{_forecast(move)}"
    )


def _forecast(move: Move) -> str:
    """Return the forecast, or the reason why a requested forecast is not used; "" without a forecast."""
    seen = move.evidence
    if "forecast_per_second" in seen:
        at = datetime.fromtimestamp(seen["forecast_at"], UTC)
        low, high = figure(seen["forecast_low"]), figure(seen["forecast_high"])
        return (
            f"; the forecast is {figure(seen['forecast_per_second'])} requests/s ({low} to {high}) at {at:%H:%M} UTC, "
            f"based on {_periods_before(seen)}"
        )
    if "forecast_error" in seen:
        return (
            f"; the forecast is not used: its recent error is {percent(math.expm1(seen['forecast_error']))}, not "
            f"clearly below the {percent(math.expm1(seen['naive_error']))} of a constant load"
        )
    return ""


def _periods_before(seen: Mapping[str, float]) -> str:
    count, seconds = int(seen["forecast_periods"]), seen["forecast_period_seconds"]
    name = {DAY_SECONDS: "day", 7 * DAY_SECONDS: "week"}.get(seconds, "period")
    return f"the previous {name}" if count == 1 else f"the previous {count:,} {name}s"


def _requests_held(move: Move, mode: Mode) -> str:
    count, seconds = int(move.evidence["held_requests"]), move.evidence["oldest_held_seconds"]
    noun = "request" if count == 1 else "requests"
    held = f"{count:,} {noun}, the oldest for {seconds:.1f} s"
    return f"{_change(move, mode)}: the router holds {held}, and no replica serves"


def _no_requests(move: Move, mode: Mode) -> str:
    return f"{_change(move, mode)}: no request arrived or was in flight for {move.evidence['idle_seconds']:,.0f} s"


def _saturated(move: Move, _: Mode) -> str:
    advice = "add replicas, or GPUs to each" if isinstance(move.target, ReplicaCount) else f"raise {move.target.value}"
    return (
        f"Saturated: {move.evidence.get('attained', 0.0):.1%} of requests attained the objectives and no live "
        f"parameter can improve that; {advice}"
    )


def _rolled_back(move: Move, _: Mode) -> str:
    return f"Rolled {move.target.value} back from {show(move.before)} to {show(move.after)}: results became worse"


def _not_achieved(move: Move, _: Mode) -> str:
    name = move.target.value
    if move.before == move.after:
        return f"Kept {name} at {show(move.after)} although the predicted effect was not achieved: it costs nothing"
    return f"Returned {name} from {show(move.before)} to {show(move.after)}: the predicted effect was not achieved"


def _contradicted(move: Move, _: Mode) -> str:
    predicted, attained = percent(move.evidence["predicted"]), percent(move.evidence["attained"])
    return (
        f"{attained} of requests attained the objectives with {show(move.after)} replicas, but {predicted} were "
        f"predicted; the observation is used"
    )


def _restarted(move: Move, _: Mode) -> str:
    cause = "ran out of memory" if move.evidence["out_of_memory"] else "crashed"
    code = f" (exit code {int(move.evidence['exit_code'])})" if "exit_code" in move.evidence else ""
    return (
        f"Lowered {move.target.value} from {show(move.before)} to its start value {show(move.after)}: an engine {cause}"
        f"{code} above the start values (crash {int(move.evidence['crashes'])})"
    )


def _device_memory_pressure(move: Move, mode: Mode) -> str:
    return (
        f"{_change(move, mode)}: only {move.evidence['free_share']:.2%} of device memory is free, because other "
        f"processes use more of it"
    )


def _bounds(move: Move, _: Mode) -> str:
    before, after = show(move.before), show(move.after)
    return f"Moved {move.target.value} from {before} to {after}: the bounds no longer allow {before}"


def _startup_out_of_memory(move: Move, _: Mode) -> str:
    name = move.target.parameter if isinstance(move.target, Restart) else move.target.value
    return f"An engine runs out of memory during start-up; lower {name}"


_FORMATTERS: Mapping[Reason, Callable[[Move, Mode], str]] = {
    Reason.KV_CACHE_TOO_SMALL: _kv_too_small,
    Reason.KV_CACHE_LARGER_THAN_NEEDED: _kv_larger,
    Reason.ADMITTED_TOO_EARLY: _admitted_too_early,
    Reason.WATERMARK_NOT_NEEDED: _watermark_not_needed,
    Reason.CHUNKS_TOO_LARGE: _budget,
    Reason.CHUNKS_TOO_SMALL: _budget,
    Reason.BATCH_TOO_LARGE: _batch_too_large,
    Reason.TOO_FEW_SEQUENCE_SLOTS: _too_few_slots,
    Reason.TOO_FEW_REPLICAS: _replicas,
    Reason.TOO_MANY_REPLICAS: _replicas,
    Reason.REQUESTS_HELD: _requests_held,
    Reason.NO_REQUESTS: _no_requests,
    Reason.SATURATED: _saturated,
    Reason.ROLLED_BACK: _rolled_back,
    Reason.PREDICTION_NOT_ACHIEVED: _not_achieved,
    Reason.PREDICTION_CONTRADICTED: _contradicted,
    Reason.ROLLED_BACK_AFTER_RESTART: _restarted,
    Reason.DEVICE_MEMORY_PRESSURE: _device_memory_pressure,
    Reason.BOUNDS_CHANGED: _bounds,
    Reason.STARTUP_OUT_OF_MEMORY: _startup_out_of_memory,
}


def _expected(entry: Expectation) -> str:
    before, after = show_amount(entry.measure, entry.before), show_amount(entry.measure, entry.after)
    if before == after:
        return f"{entry.measure.value} is expected to stay at {after}"
    return f"{entry.measure.value} is expected to change from {before} to {after}"


def show_amount(measure: Measure, value: float) -> str:
    """Return a value of a measure for display: 9.1%, 12 ms, 95 tokens/s."""
    if measure in (Measure.ATTAINMENT, Measure.RECOMPUTED):
        return percent(value)
    if measure in (Measure.TTFT_P95, Measure.ITL_P95):
        return f"{figure(value * 1000)} ms"
    if measure in (Measure.CAPACITY, Measure.GOOD):
        return f"{figure(value)} requests/s"
    if measure is Measure.TOKENS:
        return f"{figure(value)} tokens/s"
    return "more" if math.isinf(value) else f"{value:,.0f}"


def format_distinct(one: float, other: float, render: Callable[[float, int], str]) -> tuple[str, str]:
    """Return both figures, formatted by `render` with as many extra digits as needed to differ."""
    for extra in range(MAX_EXTRA_DIGITS):
        texts = render(one, extra), render(other, extra)
        if texts[0] != texts[1]:
            break
    return texts


def percent(value: float, extra: int = 0) -> str:
    """Return a share as a percentage with one decimal and `extra` more."""
    return f"{value:.{1 + extra}%}"


def figure(value: float, extra: int = 0) -> str:
    """Return a number with three significant digits and `extra` more; larger integers keep all digits."""
    if not math.isfinite(value) or value == 0:
        return f"{value:.3g}"
    decimals = max(0, 2 + extra - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1 else f"{value:.4g}"
