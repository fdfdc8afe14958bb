"""Decisions as sentences with their numbers: the words of status, Events, the log and `trimtab why`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from trimtab_operator.tuner.knobs import Value
from trimtab_operator.tuner.load.season import DAY_SECONDS
from trimtab_operator.tuner.moves import Decision, Expectation, Measure, Move, Reason, ReplicaCount, Restart
from trimtab_operator.tuner.settings import Mode

MIB = 1 << 20
MOST_DIGITS = 9  # beyond those that are usual, to tell two figures apart

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
    Reason.TOO_FEW_SEATS: "You can process more […] in a batch.",
    Reason.TOO_FEW_REPLICAS: "When you need to scale throughput rather than model size (data parallelism).",
    Reason.TOO_MANY_REPLICAS: "When you have enough GPUs to replicate the entire model (data parallelism).",
    Reason.SATURATED: "Increase tensor_parallel_size. […] Increase pipeline_parallel_size.",
}
"""The optimisation guide's sentence behind each rule. Reasons that are not named here are safety, or a way back."""


def sentence_of(move: Move, mode: Mode) -> str:
    """What was done, or would be, on which evidence, what is expected, and what would have led to something else."""
    tell = _TELL[move.reason]
    parts = [tell(move, mode)]
    parts += [_expected(entry) for entry in move.expected[:2]]
    if move.would_change:
        parts.append(f"not with {move.would_change}")
    return "; ".join(parts) + "."


def why(history: tuple[Decision, ...], recommendation: Decision | None) -> str:
    """What `trimtab why` prints: each decision with its id, grounds, the guide's advice and what came of it; newest
    first."""
    if not history and recommendation is None:
        return "Nothing was decided yet: no promise is missed, nothing is preempted, and the replicas fit the load."
    lines: list[str] = []
    if recommendation is not None:
        lines += ["Recommended:", *_told(recommendation), ""]
    for decision in reversed(history):
        lines += [*_told(decision), ""]
    return "\n".join(lines).rstrip()


def _told(decision: Decision) -> list[str]:
    lines = [f"[{decision.id}] {decision.reason.value}: {decision.sentence}"]
    move = decision.move
    lines += [f"    evidence: {name.replace('_', ' ')} {_number(value)}" for name, value in move.evidence.items()]
    for entry in move.expected:
        interval = (
            "" if math.isinf(entry.high) else f" (between {_amount(entry, entry.low)} and {_amount(entry, entry.high)})"
        )
        before, after = _amount(entry, entry.before), _amount(entry, entry.after)
        change = f"stays at {after}" if before == after else f"from {before} to {after}"
        lines.append(f"    predicted: {entry.measure.value} {change}{interval}")
    guide = GUIDE.get(decision.reason)
    if guide is not None:
        lines.append(f'    the guide: "{guide}"')
    if decision.outcome:
        lines.append(f"    what came of it: {decision.outcome}")
    return lines


# --- the parts of a sentence ------------------------------------------------------------------------------------------


def show(value: Value | None) -> str:
    """A knob's value as people write it: 0.86, 2,048."""
    if value is None:
        return "nothing"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}".rstrip("0").rstrip(".")


def _change(move: Move, mode: Mode) -> str:
    done = mode is Mode.AUTO
    verb = ("Raised" if done else "Raise") if move.is_raise else ("Lowered" if done else "Lower")
    return f"{verb} {move.target.value} from {show(move.before)} to {show(move.after)}"


def _preemption(move: Move) -> str:
    twice, count = move.evidence["recomputed_share"], int(move.evidence["preemptions"])
    noun = "preemption" if count == 1 else "preemptions"
    return f"{percent(twice)} of the tokens are computed twice ({count:,} {noun} in a minute)"


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
        f"{_change(move, mode)}: nothing was preempted for {move.evidence['quiet_seconds'] / 60:.0f} minutes and no "
        f"more "
        f"than {move.evidence['kv_peak']:.0%} of the KV cache was in use"
    )


def _watermark_not_needed(move: Move, mode: Mode) -> str:
    return f"{_change(move, mode)}: nothing was preempted for {move.evidence['quiet_seconds'] / 60:.0f} minutes"


def _budget(move: Move, mode: Mode) -> str:
    name = next((name for name in _GAINS if f"{name}_then" in move.evidence), "capacity")
    now, then = move.evidence[f"{name}_now"], move.evidence[f"{name}_then"]
    told = apart(now, then, percent if name == "attainment" else figure)
    come = figure(move.evidence["requests_per_second"])
    return f"{_change(move, mode)}: {_GAINS[name].format(now=told[0], then=told[1])}; {come} requests/s come"


_GAINS: Mapping[str, str] = {
    "capacity": "{then} requests/s within the promises instead of {now}",
    "attainment": "{then} of the requests within the promises instead of {now}",
    "good_requests_per_second": "{then} requests/s that keep their promises instead of {now}",
    "tokens_per_second": "{then} tokens/s instead of {now}, and nothing is promised",
}
"""What a budget brings, by the name of the evidence."""


def _batch_too_large(move: Move, mode: Mode) -> str:
    step, target = move.evidence["decode_step_seconds"] * 1000, move.evidence["itl_target_seconds"] * 1000
    running, promised = f"{move.evidence['running']:.0f} requests", f"{figure(target)} ms between tokens are promised"
    if step <= target:
        return (
            f"{_change(move, mode)}: the answers of {running} do not fit the KV cache, those that are preempted stall, "
            f"and {promised}"
        )
    took, target_told = apart(step, target, figure)
    return (
        f"{_change(move, mode)}: a decode step of {running} takes {took} ms, and {target_told} ms between tokens are "
        f"promised"
    )


def _too_few_seats(move: Move, mode: Mode) -> str:
    return (
        f"{_change(move, mode)}: the queue waits for a seat {move.evidence['blocked_by_seats_share']:.0%} of the time "
        f"while {1 - move.evidence['kv_usage']:.0%} of the KV cache is free"
    )


def _replicas(move: Move, mode: Mode) -> str:
    if "capacity_per_replica" not in move.evidence:
        return f"{_change(move, mode)}: no request has come for a minute, and none is there"
    rate, foreseen = move.evidence["requests_per_second"], move.evidence["foreseen_per_second"]
    queue = int(move.evidence.get("replicas_for_queue", 0))
    waits = f", {queue} of them for what waits already" if queue else ""
    if move.evidence.get("is_overfull"):
        waits += "; but the KV caches are nearly full, and would overflow"
    meant = move.evidence.get("replicas_meant")
    awaited = f"but the {meant:.0f} replicas at the beginning were meant for more: " if meant else ""
    return (
        f"{_change(move, mode)}: {rate:.3g} requests/s come, {awaited}{foreseen:.3g} are provided for by when a "
        f"replica could serve, "
        f"and one holds {move.evidence['capacity_per_replica']:.3g}{waits}{_forecast(move)}"
    )


def _forecast(move: Move) -> str:
    """What is forecast, or why a forecast that is asked for is not followed."""
    seen = move.evidence
    if "forecast_per_second" in seen:
        at = datetime.fromtimestamp(seen["forecast_at"], UTC)
        low, high = figure(seen["forecast_low"]), figure(seen["forecast_high"])
        return (
            f"; arrivals are forecast to be {figure(seen['forecast_per_second'])}/s "
            f"({low} to {high}) at {at:%H:%M} UTC, as {_periods_before(seen)}"
        )
    if "forecast_error" in seen:
        return (
            f"; the forecast is not followed, as it was off by {percent(math.expm1(seen['forecast_error']))} lately, "
            f"and the present load by {percent(math.expm1(seen['naive_error']))}: it has to be clearly better"
        )
    return ""


def _periods_before(seen: Mapping[str, float]) -> str:
    count, seconds = int(seen["forecast_periods"]), seen["forecast_period_seconds"]
    place, name = {DAY_SECONDS: ("on", "day"), 7 * DAY_SECONDS: ("in", "week")}.get(seconds, ("in", "period"))
    return f"{place} the {name} before" if count == 1 else f"{place} the {count:,} {name}s before"


def _saturated(move: Move, _: Mode) -> str:
    what = "add replicas, or GPUs to each" if isinstance(move.target, ReplicaCount) else f"raise {move.target.value}"
    return (
        f"Saturated: {move.evidence.get('attained', 0.0):.1%} of the requests kept their promises and every knob is "
        f"where "
        f"it helps most; {what}"
    )


def _rolled_back(move: Move, _: Mode) -> str:
    return f"Rolled {move.target.value} back from {show(move.before)} to {show(move.after)}: it made things worse"


def _restarted(move: Move, _: Mode) -> str:
    cause = "ran out of memory" if move.evidence["out_of_memory"] else "crashed"
    code = f" (exit code {int(move.evidence['exit_code'])})" if "exit_code" in move.evidence else ""
    return (
        f"Lowered {move.target.value} from {show(move.before)} to its start {show(move.after)}: an engine {cause}"
        f"{code} above the start values (crash {int(move.evidence['crashes'])})"
    )


def _memory_taken(move: Move, mode: Mode) -> str:
    return (
        f"{_change(move, mode)}: only {move.evidence['free_share']:.2%} of the device is free, as others use more of it"
    )


def _bounds(move: Move, _: Mode) -> str:
    before, after = show(move.before), show(move.after)
    return f"Moved {move.target.value} from {before} to {after}: its bounds no longer allow {before}"


def _start_too_large(move: Move, _: Mode) -> str:
    what = move.target.parameter if isinstance(move.target, Restart) else move.target.value
    return f"An engine runs out of memory while it starts: lower {what}"


_TELL: Mapping[Reason, Callable[[Move, Mode], str]] = {
    Reason.KV_CACHE_TOO_SMALL: _kv_too_small,
    Reason.KV_CACHE_LARGER_THAN_NEEDED: _kv_larger,
    Reason.ADMITTED_TOO_EARLY: _admitted_too_early,
    Reason.WATERMARK_NOT_NEEDED: _watermark_not_needed,
    Reason.CHUNKS_TOO_LARGE: _budget,
    Reason.CHUNKS_TOO_SMALL: _budget,
    Reason.BATCH_TOO_LARGE: _batch_too_large,
    Reason.TOO_FEW_SEATS: _too_few_seats,
    Reason.TOO_FEW_REPLICAS: _replicas,
    Reason.TOO_MANY_REPLICAS: _replicas,
    Reason.SATURATED: _saturated,
    Reason.MADE_WORSE: _rolled_back,
    Reason.RESTARTED_AFTER: _restarted,
    Reason.MEMORY_TAKEN: _memory_taken,
    Reason.BOUNDS_CHANGED: _bounds,
    Reason.START_TOO_LARGE: _start_too_large,
}


def _expected(entry: Expectation) -> str:
    before, after = _amount(entry, entry.before), _amount(entry, entry.after)
    if before == after:
        return f"{entry.measure.value} should stay at {after}"
    return f"{entry.measure.value} should go from {before} to {after}"


def _amount(entry: Expectation, value: float) -> str:
    if entry.measure in (Measure.ATTAINMENT, Measure.RECOMPUTED):
        return percent(value)
    if entry.measure in (Measure.TTFT_P95, Measure.ITL_P95):
        return f"{figure(value * 1000)} ms"
    if entry.measure in (Measure.CAPACITY, Measure.GOOD):
        return f"{figure(value)} requests/s"
    if entry.measure is Measure.TOKENS:
        return f"{figure(value)} tokens/s"
    return "more" if math.isinf(value) else f"{value:,.0f}"


def apart(one: float, other: float, tell: Callable[[float, int], str]) -> tuple[str, str]:
    """Both figures as `tell` writes them, with as many more digits as tell them apart."""
    for more in range(MOST_DIGITS):
        told = tell(one, more), tell(other, more)
        if told[0] != told[1]:
            break
    return told


def percent(value: float, more: int = 0) -> str:
    """A share in percent, with one decimal and some more."""
    return f"{value:.{1 + more}%}"


def figure(value: float, more: int = 0) -> str:
    """A number with three digits and some more, or all of a larger one's."""
    if not math.isfinite(value) or value == 0:
        return f"{value:.3g}"
    decimals = max(0, 2 + more - math.floor(math.log10(abs(value))))
    told = f"{value:,.{decimals}f}"
    return told.rstrip("0").rstrip(".") if "." in told else told


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1 else f"{value:.4g}"
