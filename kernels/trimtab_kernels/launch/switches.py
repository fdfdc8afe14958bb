"""Ways of the GPU kernels that no GPU has judged yet. Each is off until one has said that it is right and faster; the
benchmark and the tests on a GPU turn them on beside the other way, and the environment variable for a whole process:

TRIMTAB_GPU_WAYS=gluon-prefill,dependent-launches

Read once; ranks and workers inherit it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

VARIABLE = "TRIMTAB_GPU_WAYS"


@dataclass(frozen=True, slots=True)
class Ways:
    """gluon_prefill: attention of prompts by the warp-specialised kernel where it suits (`paged_prefill_gluon`).
    gluon_float8: products of float8 blocks likewise (`w8a8_block_fp8_gluon`).
    dependent_launches: kernels of a step of few rows begin while the one before them ends (`launch/dependence.py`)."""

    gluon_prefill: bool = False
    gluon_float8: bool = False
    dependent_launches: bool = False


NAMES = {
    "gluon-prefill": "gluon_prefill",
    "gluon-float8": "gluon_float8",
    "dependent-launches": "dependent_launches",
}
_set: list[Ways] = []
"""The innermost `taking` last."""


def parse(text: str) -> Ways:
    """Names, separated by commas. Raises ValueError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"{VARIABLE} names {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return Ways(**{NAMES[name]: True for name in names})


@cache
def _of_the_process() -> Ways:
    return parse(os.environ.get(VARIABLE, ""))


def ways() -> Ways:
    """What launchers ask. Raises ValueError where the variable names what there is not."""
    return _set[-1] if _set else _of_the_process()


@contextmanager
def taking(chosen: Ways) -> Iterator[None]:
    """Within the block launchers take these ways."""
    _set.append(chosen)
    try:
        yield
    finally:
        _set.pop()
