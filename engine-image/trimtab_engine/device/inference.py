"""torch's inference mode for steps, entered once per step."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` to run in inference mode. Entering it takes the host as long as launching a kernel, so it is
    skipped if already active.
    """
    entering = torch.inference_mode()(function)

    @wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs) if torch.is_inference_mode_enabled() else entering(*args, **kwargs)

    return within
