"""One line of the benchmark: what runs, what it must equal, what it moves or computes, and beside whom."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """`amount` bytes (limits copy, read) or FLOPs (bf16, fp8, sheet) per call; `bar` is the share of the limit that is
    asked, 0 where none is.

    `ours` and `reference` return what is compared, within `tolerance` of the reference's largest value. Peers return
    anything; one that cannot run here is reported as such. `compiled` are those that compile for seconds or minutes:
    they are run when all rows are there. `read`, where there is one, reads what `ours` wrote into its inputs, and is
    not timed.
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


class Wrong(Exception):
    """A kernel's result is not its reference's."""


def check(row: Row) -> float:
    """The largest error relative to the reference's largest value. Raises Wrong above the tolerance, or for NaN.

    Whatever a kernel allocates is filled with NaN first, so that what it does not write shows.
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
    if not error <= row.tolerance:  # also where it is NaN
        raise Wrong(f"{row.name}: off by {error:.2e} of the largest value; {row.tolerance:.0e} is allowed")
    return error


def compiled_once(function: Callable[..., object]) -> Callable[..., object]:
    """torch.compile at the first call, which takes seconds: rows that are not measured do not pay for it."""
    compiled: list[Callable[..., object]] = []

    def call(*arguments: object) -> object:
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*arguments)

    return call


def tolerance_of(dtype: torch.dtype) -> float:
    """Of results that are rounded once or twice to this dtype."""
    return 4 * torch.finfo(dtype).eps
