"""Decisions as sentences with their numbers: the words of status, Events and the log."""

from __future__ import annotations

from trimtab_operator.tuner.preemptions.decision import Move
from trimtab_operator.tuner.preemptions.diagnosis import KnobRange, Situation
from trimtab_operator.tuner.preemptions.observation import Knob, Pressure, Value
from trimtab_operator.tuner.preemptions.state import Mode, Watch

MIB = 1 << 20
SECONDS_PER_MINUTE = 60


def explain(move: Move, situation: Situation, mode: Mode) -> str:
    """One sentence: what was (or would be) done, on which evidence, and what to expect."""
    seen = f"{_preemptions(situation.worst)} ({situation.worst.kv_usage_peak:.0%} of the KV cache used)"
    if move.knob is None:
        return (
            f"Saturated: {seen} and every knob is at its bound ({_bounds(situation)}); "
            "add replicas, or spread the model over more GPUs (parallelism.tensor, then parallelism.pipeline)."
        )
    verb = _verb(move.before, move.after, mode)
    what = f"{verb} {move.knob} from {show(move.before)} to {show(move.after)}: {seen}"
    if move.knob is Knob.GPU_MEMORY_UTILIZATION:
        headroom = move.evidence["headroom_bytes"] / MIB
        tokens = int(move.evidence["expected_kv_tokens"])
        return f"{what} and the device has {headroom:,.0f} MiB of headroom; expect about {tokens:,} more KV tokens."
    why = _no_headroom(situation.ranges.get(Knob.GPU_MEMORY_UTILIZATION))
    if move.knob is Knob.MAX_NUM_SEQS:
        held, blocks = int(move.evidence["requests_held"]), move.evidence["blocks_per_request"]
        return (
            f"{what}, {why}, and the KV cache holds about {held} requests of {blocks:.0f} blocks; "
            f"expect at most {show(move.after)} at once, the others wait their turn instead of being recomputed."
        )
    return (
        f"{what}, {why}, and max_num_seqs is as low as it may go; "
        "expect prompts to claim KV blocks in smaller pieces, with a later first token."
    )


def explain_rollback(watch: Watch, seen: Pressure, *, avoid_seconds: float) -> str:
    before = watch.preemptions / max(watch.generated_tokens, 1.0) * 1000
    after = seen.preemptions / max(seen.generated_tokens, 1.0) * 1000
    return (
        f"Rolled {watch.knob} back from {show(watch.after)} to {show(watch.before)}: preemptions rose from "
        f"{before:.1f} to {after:.1f} per 1,000 tokens at comparable load ({watch.demand:.0f} and {seen.demand:.0f} "
        f"requests); it stays there for {avoid_seconds / SECONDS_PER_MINUTE:.0f} minutes."
    )


def explain_restart(watch: Watch, group: str, *, after_seconds: float, avoid_seconds: float) -> str:
    return (
        f"Rolled {watch.knob} back from {show(watch.after)} to {show(watch.before)}: the engine of {group} restarted "
        f"within {after_seconds:.0f} s of the raise; it is not raised for "
        f"{avoid_seconds / SECONDS_PER_MINUTE:.0f} minutes."
    )


def explain_bounds(knob: Knob, before: Value, after: Value) -> str:
    return f"Moved {knob} from {show(before)} to {show(after)}: its bounds no longer allow {show(before)}."


def show(value: Value | None) -> str:
    """A knob's value as people write it: 0.86, 2,048."""
    if value is None:
        return "nothing"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}".rstrip("0").rstrip(".")


def _preemptions(seen: Pressure) -> str:
    noun = "preemption" if seen.preemptions == 1 else "preemptions"
    return f"{seen.preemptions:,} {noun} in {seen.seconds:.0f} s"


def _verb(before: Value | None, after: Value | None, mode: Mode) -> str:
    assert before is not None
    assert after is not None
    if mode is Mode.AUTO:
        return "Raised" if after > before else "Lowered"
    return "Raise" if after > before else "Lower"


def _no_headroom(utilization: KnobRange | None) -> str:
    if utilization is None or not utilization.is_live:
        return "the size of the KV cache is fixed"
    return f"gpu_memory_utilization may not rise above {show(max(utilization.current, utilization.highest))}"


def _bounds(situation: Situation) -> str:
    return ", ".join(
        f"{knob} {show(knob_range.current)}{'' if knob_range.is_live else ' (fixed)'}"
        for knob, knob_range in situation.ranges.items()
    )
