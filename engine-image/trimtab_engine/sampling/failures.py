"""Detection of logit rows without a valid token: their requests end, other requests of the batch are unaffected.

The largest logit of such a row is NaN, or -inf if every token is forbidden.
"""

from enum import StrEnum

import torch


class Failure(StrEnum):
    """Reason why a row has no token. The values are a metric's labels."""

    NAN = "nan"  # the model computed NaN: an engine error
    NOTHING_LEFT = (
        "nothing_left"  # grammar, allowed_token_ids, bad_words and min_tokens forbid every token: the client's
    )


def failures_of(best: torch.Tensor) -> dict[int, Failure]:
    """best [rows] float32, on the host: each row's largest logit, or that of the token chosen there. By row."""
    if not best.numel() or float(best.min()) > float("-inf"):  # the least of them is NaN where any is
        return {}
    return {
        row: Failure.NOTHING_LEFT if value == float("-inf") else Failure.NAN
        for row, value in enumerate(best.tolist())
        if not value > float("-inf")
    }
