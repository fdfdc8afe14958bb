"""Alternative backends of the GPU kernels. A backend becomes the default after a GPU run has shown that it is correct
and faster (docs/results/gpu.md). The environment variable replaces the default for a whole process; `none` disables all
of them:

TRIMTAB_KERNEL_BACKENDS=gluon-prefill,dependent-launches

It is read once; ranks and workers inherit it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

ENVIRONMENT_VARIABLE = "TRIMTAB_KERNEL_BACKENDS"


@dataclass(frozen=True, slots=True)
class KernelBackends:
    """Enabled backends.

    gluon_prefill: prefill attention by the warp-specialised kernel if it supports the shapes (`paged_prefill_gluon`).
    gluon_float8: float8 block GEMMs by the warp-specialised kernel if it supports the shapes (`w8a8_block_fp8_gluon`).
    dependent_launches: kernels of a step of few rows start while the previous kernel ends (`launch/dependence.py`).
    """

    gluon_prefill: bool = False
    gluon_float8: bool = False
    dependent_launches: bool = False


NAMES = {
    "gluon-prefill": "gluon_prefill",
    "gluon-float8": "gluon_float8",
    "dependent-launches": "dependent_launches",
}
DEFAULT = KernelBackends(gluon_prefill=True, gluon_float8=True)
"""On an H200, dependent launches are correct but made no engine faster, although four layers of one row take 537 us
with them and 557 us without."""
NONE = "none"
_overrides: list[KernelBackends] = []
"""Active overrides; the innermost is the last."""


def parse(text: str) -> KernelBackends:
    """Parse backend names separated by commas, or `none`; an empty text is the default.

    Raises:
        ValueError: a name is unknown.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        return DEFAULT
    if names == [NONE]:
        return KernelBackends()
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(
            f"{ENVIRONMENT_VARIABLE}: unknown backend ({', '.join(unknown)}); use {', '.join(NAMES)} or {NONE}"
        )
    return KernelBackends(**{NAMES[name]: True for name in names})


@cache
def _process_backends() -> KernelBackends:
    return parse(os.environ.get(ENVIRONMENT_VARIABLE, ""))


def kernel_backends() -> KernelBackends:
    """Return the enabled backends.

    Raises:
        ValueError: the environment variable contains an unknown name.
    """
    return _overrides[-1] if _overrides else _process_backends()


@contextmanager
def override_backends(chosen: KernelBackends) -> Iterator[None]:
    """Use these backends for the launches within the block."""
    _overrides.append(chosen)
    try:
        yield
    finally:
        _overrides.pop()
