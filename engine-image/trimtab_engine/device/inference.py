"""Nothing is trained here: what computes a step runs in torch's inference mode, which is entered once for all of it."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def inferring(function: Callable[P, R]) -> Callable[P, R]:
    """`function` in inference mode. To enter it takes the host as long as to launch a kernel, so whoever is in it
    already does not enter it again."""
    entering = torch.inference_mode()(function)

    @wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs) if torch.is_inference_mode_enabled() else entering(*args, **kwargs)

    return within
