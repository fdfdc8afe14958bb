"""What users are promised: objectives, and whether a request, or a share of requests, meets them.

The first token may take longer for a longer prompt. An inter-token objective says which latency it means: a request's
mean gap, or every gap between two tokens; long answers hardly notice one slow step, single gaps do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from trimtab_operator.tuner.engine_model import Allowance, StepCost

DEFAULT_FACTOR = 3.0  # without objectives: so many times what an idle engine takes
DEFAULT_SHARE = 0.95


class ItlKind(StrEnum):
    """Which inter-token latency an objective means."""

    MEAN = "mean"  # a request's mean gap
    TOKENS = "tokens"  # each gap between two tokens


@dataclass(frozen=True, slots=True)
class Ttft:
    """The first token comes within `seconds` + `seconds_per_prompt_token` × prompt, for `share` of the requests."""

    seconds: float
    seconds_per_prompt_token: float = 0.0
    share: float = DEFAULT_SHARE

    def limit(self, prompt_tokens: float) -> float:
        """Seconds that a prompt of this length may take."""
        return self.seconds + self.seconds_per_prompt_token * prompt_tokens


@dataclass(frozen=True, slots=True)
class Itl:
    """Gaps, or mean gaps, are at most `seconds` for `share` of the gaps, or requests."""

    seconds: float
    kind: ItlKind = ItlKind.MEAN
    share: float = DEFAULT_SHARE


@dataclass(frozen=True, slots=True)
class Objectives:
    """What is promised. `are_given`: by the owner; else they are the defaults."""

    ttft: Ttft | None = None
    itl: Itl | None = None
    are_given: bool = True
    order_queues: bool = False
    """Whether engines serve those first who can still have their first token in time (queue order `deadline`)."""

    @property
    def allowance(self) -> Allowance | None:
        """What the engines' queues are ordered by; None: by arrival."""
        if self.ttft is None or not self.order_queues:
            return None
        return Allowance(self.ttft.seconds, self.ttft.seconds_per_prompt_token)

    @property
    def share(self) -> float:
        """The share of requests that must meet everything: the laxer promise, as no request is promised more."""
        shares = [promise.share for promise in (self.ttft, self.itl) if promise is not None]
        return min(shares) if shares else DEFAULT_SHARE

    def is_met(self, *, prompt: int, ttft: float | None, mean_gap: float | None) -> bool:
        """Whether one request kept its promises, as far as a request alone can: token gaps are judged together."""
        if self.ttft is not None and (ttft is None or ttft > self.ttft.limit(prompt)):
            return False
        if self.itl is None or self.itl.kind is not ItlKind.MEAN:
            return True
        return mean_gap is None or mean_gap <= self.itl.seconds

    @property
    def slow_gap(self) -> float:
        """From which length on a single gap breaks a promise; infinite where gaps are not promised."""
        return self.itl.seconds if self.itl is not None and self.itl.kind is ItlKind.TOKENS else math.inf

    def completed(self, cost: StepCost, *, typical_context: float) -> Objectives:
        """With defaults for what the owner left open altogether: 3 × what an idle engine takes for it.

        An owner who promises one thing promises nothing else, so defaults come only where nothing is given.
        """
        if self.ttft is not None or self.itl is not None:
            return self
        alone = cost.seconds(1, 1, round(typical_context), round(typical_context))
        ttft = Ttft(
            seconds=DEFAULT_FACTOR * (cost.per_step + cost.per_prefill_step + cost.per_sequence),
            seconds_per_prompt_token=DEFAULT_FACTOR * (cost.per_token + cost.per_attended * typical_context / 2),
        )
        return Objectives(ttft, Itl(DEFAULT_FACTOR * alone), are_given=False)
