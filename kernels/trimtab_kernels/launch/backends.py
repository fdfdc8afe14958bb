"""Ways of the GPU kernels beside their plain ones. Each is off until a GPU has said that it is right and faster, and
then the default (docs/results/gpu.md has both); the environment variable says for a whole process which are taken
instead of the default, `none` of them included:

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
DEFAULT = Ways(gluon_prefill=True, gluon_float8=True)
"""On an H200 dependent launches are right; no engine was faster by them, though four layers of one row take 537 us with
them and 557 without."""
NONE = "none"
_set: list[Ways] = []
"""The innermost `taking` last."""


def parse(text: str) -> Ways:
    """Names, separated by commas, or `none`; nothing is the default. Raises ValueError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        return DEFAULT
    if names == [NONE]:
        return Ways()
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"{VARIABLE} names {', '.join(unknown)}; there are {', '.join(NAMES)}, and {NONE}")
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
