"""One row of the benchmark: the call, its reference, its bytes or FLOPs, and its peers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """`amount` bytes (limits copy, read) or FLOPs (bf16, fp8, sheet) per call; `bar` is the target share of the limit,
    0 without a target.

    `ours` and `reference` return tensors that must match within `tolerance` of the reference's largest value. Peers
    return anything; one that cannot run here is reported as such. `compiled` are peers that compile for seconds or
    minutes: they run after all rows. `read`, if set, reads the data that `ours` wrote into its inputs, and is not
    timed.
    """

    name: str
    limit: str
    amount: float
    bar: float
    ours: Call
    reference: Call
    tolerance: float
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)
    compiled: dict[str, Callable[[], object]] = field(default_factory=dict)
    read: Call | None = None


class WrongResult(Exception):
    """A kernel's result differs from its reference."""


def check(row: Row) -> float:
    """Return the largest error relative to the reference's largest value.

    Memory that a kernel allocates is filled with NaN first, so that unwritten output is detected.

    Raises:
        Wrong: the error exceeds the tolerance or is NaN.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        result = row.ours()
        found = (result if row.read is None else row.read()).float()
    finally:
        torch.use_deterministic_algorithms(was_on)
    expected = row.reference().float()
    largest = max(float(expected.abs().max()), 1e-30)
    error = float((found - expected).abs().max()) / largest
    if not error <= row.tolerance:  # also true for NaN
        raise WrongResult(f"{row.name}: off by {error:.2e} of the largest value; {row.tolerance:.0e} is allowed")
    return error


def compiled_once(function: Callable[..., object]) -> Callable[..., object]:
    """Apply torch.compile at the first call, which takes seconds: rows that are not measured do not pay for it."""
    compiled: list[Callable[..., object]] = []

    def call(*arguments: object) -> object:
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*arguments)

    return call


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the tolerance of results that are rounded once or twice to this dtype."""
    return 4 * torch.finfo(dtype).eps
