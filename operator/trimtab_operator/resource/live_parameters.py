"""Start values and caps of the live knobs: what the pod template renders and what tuning starts from.

Caps follow three rules: `tuning.bounds.X.max` where it is given; else the start value with mode Off; else 0.95 for the
utilisation and twice the start for the counts. On CUDA the engine's own starts depend on the GPU, so a count that the
spec leaves out gets no cap from us: the engine then caps it at its start value.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from trimtab_operator.resource.spec import FractionBounds, IntBounds, Spec

DEFAULT_UTILIZATION = Decimal("0.9")  # docs/reference/contract.md, section 1
DEFAULT_UTILIZATION_CAP = Decimal("0.95")  # the rest is for what the ledger cannot see
CPU_MAX_NUM_SEQS = 128  # docs/reference/contract.md, section 1
CPU_MAX_NUM_BATCHED_TOKENS = 2048  # docs/reference/contract.md, section 1
CAP_FACTOR = 2  # of a count, over its start
MAX_COUNT = Decimal(1048576)  # no bound in the CRD is higher, and the engine refuses more


@dataclass(frozen=True, slots=True)
class LiveParameter:
    """One live knob: `start` is None when only the engine knows it, `cap` None when the engine's default cap holds."""

    field: str
    start: Decimal | None
    cap: Decimal | None
    is_start_given: bool


def knobs(spec: Spec) -> tuple[LiveParameter, LiveParameter, LiveParameter]:
    """The live knobs: gpu_memory_utilization, max_num_seqs, max_num_batched_tokens."""
    on_cpu = spec.runtime.device == "cpu"
    engine, bounds = spec.engine, spec.tuning.bounds
    return (
        _knob(
            spec,
            "gpu_memory_utilization",
            engine.gpu_memory_utilization,
            DEFAULT_UTILIZATION,
            bounds.gpu_memory_utilization,
        ),
        _knob(spec, "max_num_seqs", engine.max_num_seqs, CPU_MAX_NUM_SEQS if on_cpu else None, bounds.max_num_seqs),
        _knob(
            spec,
            "max_num_batched_tokens",
            engine.max_num_batched_tokens,
            CPU_MAX_NUM_BATCHED_TOKENS if on_cpu else None,
            bounds.max_num_batched_tokens,
        ),
    )


def _knob(
    spec: Spec,
    field: str,
    given: str | int | None,
    default: Decimal | int | None,
    bounds: FractionBounds | IntBounds | None,
) -> LiveParameter:
    start = Decimal(str(given)) if given is not None else None if default is None else Decimal(default)
    return LiveParameter(field, start, _cap(spec, field, start, bounds), given is not None)


def _cap(spec: Spec, field: str, start: Decimal | None, bounds: FractionBounds | IntBounds | None) -> Decimal | None:
    if bounds is not None and bounds.max is not None:
        return Decimal(str(bounds.max))
    if start is None or spec.tuning.mode == "Off":
        return start
    if field == "gpu_memory_utilization":
        return max(start, DEFAULT_UTILIZATION_CAP)
    return min(start * CAP_FACTOR, MAX_COUNT)
